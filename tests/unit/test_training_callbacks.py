"""Lines for people, trackers by name, and the best checkpoint after a resume."""

import importlib.util

import pytest
from transformers import TrainerControl, TrainerState

from medusa_train.inference import UserError
from medusa_train.training_callbacks import RememberBest, check_tracker, evaluation_line, training_line


def test_a_training_line_names_everything():
    logs = {"loss": 2.8873, "loss_h2": 2.614, "loss_h1": 1.9, "loss_h10": 4.0, "positions_per_second": 1420.4}
    assert training_line(logs, 40, 528, 1.841, 47) == (
        "step 40/528 · loss 2.887 · h1 1.90 h2 2.61 h10 4.00 · 1.84 tokens/step · 1,420 positions/s · 00:47 left"
    )
    assert "tokens/step" not in training_line(logs, 40, 528, 0.0, 47), "nothing was measured yet"


def test_an_evaluation_line_names_every_head():
    logs = {"eval_loss": 3.01, "eval_tokens_per_step": 1.84} | {
        f"eval_top{n}_h{k}": n / 10 + k / 100 for n in (1, 5) for k in (1, 2)
    }
    assert evaluation_line(logs, 200, 528) == (
        "step 200/528 · calibration: 1.840 tokens/step · loss 3.010 · top-1/5 h1 0.11/0.51 h2 0.12/0.52"
    )
    decoded = evaluation_line(logs | {"eval_decoded_tokens_per_step": 1.79}, 200, 528)
    assert "1.840 tokens/step, 1.790 decoded · loss" in decoded


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard", "trackio"])
def test_a_missing_tracker_names_what_to_install(monkeypatch, tracker):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    check_tracker("none")
    with pytest.raises(UserError, match=rf"pip install 'medusa-train\[{tracker}\]'"):
        check_tracker(tracker)


@pytest.mark.parametrize("exists", [True, False])
def test_the_best_checkpoint_is_looked_for_in_the_folder_of_the_run(tmp_path, exists):
    if exists:
        (tmp_path / "checkpoint-20").mkdir()
    state = TrainerState(best_global_step=20, best_metric=1.9, best_model_checkpoint="/moved/checkpoint-20")
    RememberBest(tmp_path).on_train_begin(None, state, TrainerControl())
    if exists:
        assert state.best_model_checkpoint == str(tmp_path / "checkpoint-20")
        assert state.best_metric == 1.9
    else:
        assert state.best_model_checkpoint is state.best_metric is state.best_global_step is None
