"""Training that goes on exactly where it was cut off, measures itself without harm, and refuses bad input."""

import contextlib
import errno
import importlib.util
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
import yaml
from safetensors.torch import load_file, save_file
from transformers import get_cosine_schedule_with_warmup

import medusa_train.job
import medusa_train.train_stage
import medusa_train.trainer
from conftest import assert_refused, make_llama
from medusa_train.data.hidden_states import write_shard
from medusa_train.inference import UserError
from medusa_train.inference.checkpoint import WEIGHTS
from medusa_train.job import Job
from medusa_train.recipe import load_recipe
from medusa_train.stages import run_stages

WORDS = ["what", "is", "the", "cat", "on", "mat", "and", "this", "that", "sat", "user", "system"]
SETTING = {
    "backbone": {"dtype": "float32", "device": "cpu"},
    "heads": {"num_heads": 2, "num_layers": 1, "draft_vocab_size": 128},
    "data": {"num_prompts": None, "max_new_tokens": 12, "calibration_share": 0.2, "heldout_share": 0.2},
    "training": {"num_train_epochs": 2, "per_device_train_batch_size": 48, "save_steps": 3, "logging_steps": 1},
    "inference": {"tree_sizes": [1, 4], "step_time_rounds": 1, "step_time_steps": 2},
}


@pytest.fixture(scope="module")
def cached(tmp_path_factory, tiny_chat_folder):
    """A run of all stages before training; returns its recipe."""
    folder = tmp_path_factory.mktemp("cached")
    texts = {" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 4 + i % 5)) for i in range(60)}
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{t} ?"}) + "\n" for t in sorted(texts)))
    recipe = {**SETTING, "output_dir": str(folder / "run")}
    recipe["backbone"] = SETTING["backbone"] | {"source": str(tiny_chat_folder)}
    recipe["data"] = SETTING["data"] | {"prompts": str(folder / "prompts.jsonl")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_stages(Job(load_recipe(folder / "recipe.yaml")), "cache")
    return folder / "recipe.yaml"


@pytest.fixture
def train(cached, tmp_path):
    """Train in a copy of the cached run: overrides -> job; the same ``name`` goes on in the same folder."""

    def train(*overrides, name="run"):
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(cached.parent / "run", folder)
        job = Job(load_recipe(cached, [f"output_dir={folder}", *overrides]))
        run_stages(job, "train")
        return job

    train.folder = tmp_path / "run"
    return train


def weights(job):
    return load_file(job.folder.heads / WEIGHTS)


def assert_same_weights(ours, theirs):
    ours, theirs = weights(ours), weights(theirs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def history(job):
    newest = max((job.folder.stage("train")).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    return json.loads((newest / "trainer_state.json").read_text())["log_history"]


def result(job):
    return job.folder.result("train")["result"]


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it."""


def at_optimizer_step(patch, step, act):
    """Do something right before the ``step``-th optimizer step of this process."""
    original, steps = torch.optim.AdamW.step, []

    def acting(self, *args, **kwargs):
        steps.append(1)
        if len(steps) == step:
            act()
        return original(self, *args, **kwargs)

    patch.setattr(torch.optim.AdamW, "step", acting)


def kill():
    raise Killed


def train_and_kill(train, monkeypatch, step, *overrides, **named):
    with monkeypatch.context() as patch:
        at_optimizer_step(patch, step, kill)
        with pytest.raises(Killed):
            train(*overrides, **named)


ACCUMULATED = ("training.per_device_train_batch_size=16", "training.gradient_accumulation_steps=3")


@pytest.mark.parametrize(
    "setting", [(), ACCUMULATED, ("heads.kind=hydra",), ("heads.kind=recurrent",), ("heads.lm_head=shared",)]
)
def test_killed_again_and_again_it_ends_in_the_same_weights(train, monkeypatch, setting):
    unbroken = train(*setting, name="unbroken")
    steps = result(unbroken)["optimizer_steps"]
    assert steps > 10, "no epoch would be crossed"
    for step in (2, 5, 4, 3):  # counted from each resume: before the first checkpoint, then in both epochs
        train_and_kill(train, monkeypatch, step, *setting)
    resumed = train(*setting)
    assert_same_weights(resumed, unbroken)
    assert result(resumed) == result(unbroken)
    rates = [[entry["learning_rate"] for entry in history(job) if "loss" in entry] for job in (resumed, unbroken)]
    assert rates[0] == rates[1]
    assert len(rates[1]) == steps


KILL_ITSELF = """
import os, signal, sys, torch
original, steps = torch.optim.AdamW.step, []
def step(self, *rest, **named):
    steps.append(1)
    if len(steps) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *rest, **named)
torch.optim.AdamW.step = step
from medusa_train.cli import main
sys.argv = ["medusa-train", "train", *sys.argv[1:]]
main()
"""


def test_a_process_killed_by_the_system_leaves_what_the_next_one_needs(train, cached):
    shutil.copytree(cached.parent / "run", train.folder)
    command = [sys.executable, "-c", KILL_ITSELF, str(cached), "--out", str(train.folder)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert (train.folder / "train" / "checkpoint-6").exists()
    assert_same_weights(train(), train(name="unbroken"))


def test_sigterm_saves_and_exits_with_0_and_the_next_command_goes_on(train, cached, command, monkeypatch):
    unbroken = train(name="unbroken")
    shutil.copytree(cached.parent / "run", train.folder)
    with monkeypatch.context() as patch:
        at_optimizer_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        code, _, told = command("train", cached, "--out", train.folder)
    assert code == 0, told
    assert "stopped by SIGTERM after step 4 of" in told
    assert "goes on from here" in told
    assert not (train.folder / "train" / "run.json").exists()
    assert (train.folder / "train" / "checkpoint-4").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert_same_weights(train(), unbroken)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scramble(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", truncate),
        ("optimizer.pt", Path.unlink),
        ("optimizer.pt", scramble),
        ("scheduler.pt", lambda path: path.write_bytes(b"")),
        ("trainer_state.json", truncate),
        ("rng_state.pth", truncate),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(train, monkeypatch, capfd, name, damage):
    unbroken = train(name="unbroken")
    train_and_kill(train, monkeypatch, 8)
    damage(train.folder / "train" / "checkpoint-6" / name)
    with monkeypatch.context() as patch:
        loaded = []
        original = medusa_train.trainer.HeadsTrainer._load_from_checkpoint
        patch.setattr(
            medusa_train.trainer.HeadsTrainer,
            "_load_from_checkpoint",
            lambda self, folder, *rest: (loaded.append(folder), original(self, folder, *rest)),
        )
        resumed = train()
    assert loaded == [str(train.folder / "train" / "checkpoint-3")]
    assert f"checkpoint-6 is damaged ({name}" in "".join(capfd.readouterr())
    assert_same_weights(resumed, unbroken)


def test_a_full_disk_leaves_the_old_checkpoint_and_gives_its_space_back(train, cached, command, monkeypatch):
    unbroken = train(name="unbroken")
    shutil.copytree(cached.parent / "run", train.folder)
    original = torch.save

    def save(content, path, *rest):
        if "checkpoint-6" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(content, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        code, _, told = command("train", cached, "--out", train.folder)
    assert code == 2
    assert told.splitlines()[-1] == (
        "medusa-train: the disk is full; free some space, and the same command goes on from here"
    )
    assert [path.name for path in (train.folder / "train").glob("checkpoint-*")] == ["checkpoint-3"]
    assert_same_weights(train(), unbroken)


@pytest.mark.parametrize("setting", [(), ACCUMULATED])
def test_the_learning_rate_follows_optimizer_steps_whatever_is_accumulated(train, setting):
    job = train(*setting)
    rates = [entry["learning_rate"] for entry in history(job) if "loss" in entry]
    steps, peak = result(job)["optimizer_steps"], job.recipe.training.learning_rate
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    warmup = math.ceil(job.recipe.training.warmup_steps * steps)
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    for step, rate in enumerate(rates, start=1):
        assert rate == pytest.approx(schedule.get_last_lr()[0]), step
        optimizer.step()
        schedule.step()
    assert len(rates) == steps


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_more_epochs_go_on_from_the_end_of_the_shorter_training(train, schedule):
    setting = (f"training.lr_scheduler_type={schedule}", "training.load_best_model_at_end=false")
    unbroken = train(*setting, "training.num_train_epochs=3", name="unbroken")
    short = train(*setting)
    first = result(short)["optimizer_steps"]
    longer = train(*setting, "training.num_train_epochs=3")
    assert result(longer)["optimizer_steps"] == result(unbroken)["optimizer_steps"] > first
    # The steps already made stay; from the one after the next on, the rate is that of the longer schedule.
    rates = [[entry["learning_rate"] for entry in history(job) if "loss" in entry] for job in (longer, unbroken)]
    assert rates[0][first + 1 :] == rates[1][first + 1 :]
    if schedule == "constant":
        assert_same_weights(longer, unbroken)
    with pytest.raises(UserError, match=r"num_train_epochs=3.0, the recipe says 2.0"):
        train(*setting)


def test_evaluation_does_not_change_what_is_learnt(train, monkeypatch):
    last, states = "training.load_best_model_at_end=false", []
    original = medusa_train.trainer.HeadsTrainer.evaluate

    def watched(self, *args, **kwargs):
        states.append((torch.get_rng_state().tolist(), self.model.training))
        metrics = original(self, *args, **kwargs)
        states.append((torch.get_rng_state().tolist(), self.model.training))
        return metrics

    monkeypatch.setattr(medusa_train.trainer.HeadsTrainer, "evaluate", watched)
    often = train(last, "training.eval_steps=1", "training.save_steps=2")
    assert sum("eval_tokens_per_step" in entry for entry in history(often)) == result(often)["optimizer_steps"]
    assert states[::2] == states[1::2]
    assert all(training for _, training in states)
    assert_same_weights(often, train(last, "training.eval_steps=0", name="never"))


@pytest.mark.parametrize("lora", [(), ("training.mode=online", "lora={r: 2, dropout: 0.5}")])
def test_an_evaluation_may_decode_answers(train, cached, monkeypatch, lora):
    """With what it measures, the last heads, on prompts of the calibration split, and without leaving a trace."""
    for name in ("run", "positions alone"):  # what an online run makes of the answers is not the cache of others
        ignored = shutil.ignore_patterns("cache") if lora else None
        shutil.copytree(cached.parent / "run", train.folder.parent / name, ignore=ignored)
    decoded, original = [], medusa_train.trainer.decoded_tokens_per_step
    evaluate, modes = medusa_train.trainer.HeadsTrainer.evaluate, []

    def evaluated(self, *args, **kwargs):
        modes.append(self.model.training)
        metrics = evaluate(self, *args, **kwargs)
        modes.append(self.model.training)
        return metrics

    monkeypatch.setattr(medusa_train.trainer.HeadsTrainer, "evaluate", evaluated)

    def watched(model, prompts):
        dropouts = [module for module in model.backbone.model.modules() if isinstance(module, torch.nn.Dropout)]
        assert len(dropouts) == (14 if lora else 0)
        assert not any(dropout.training for dropout in dropouts)
        expected = sum(model.generate(prompt, 64).stats.passes for prompt in prompts)
        made = sum(len(model.generate(prompt, 64).new_tokens[0]) - 1 for prompt in prompts)
        decoded.append((model.tree.size, [prompt.tolist() for prompt in prompts], made / expected))
        return original(model, prompts)

    monkeypatch.setattr(medusa_train.trainer, "decoded_tokens_per_step", watched)
    always = ("training.load_best_model_at_end=false", "training.num_train_epochs=1", *lora)
    job = train(*always, "training.eval_prompts=2", "training.eval_tree_size=4")
    told = [entry["eval_decoded_tokens_per_step"] for entry in history(job) if "eval_loss" in entry]
    assert told == [pytest.approx(figure) for _, _, figure in decoded]
    assert told
    assert all(modes)
    assert all(1 <= figure <= 3 for figure in told)
    rows = job.rows("calibration")[:2]
    wanted = [row.input_ids[: row.spans[0][0]] for row in rows]
    assert all(size == 4 and prompts == wanted for size, prompts, _ in decoded)
    assert_same_weights(job, train(*always, name="positions alone"))


def test_an_evaluation_reports_every_head(train):
    evaluated = [entry for entry in history(train()) if "eval_loss" in entry][-1]
    parts = {"tokens_per_step", "loss"} | {f"{name}_h{k}" for name in ("loss", "top1", "top5") for k in (1, 2)}
    assert {f"eval_{part}" for part in parts} <= evaluated.keys()
    assert 1 < evaluated["eval_tokens_per_step"] <= 3
    assert evaluated["eval_loss"] == pytest.approx(
        # The mean over (position, head) pairs weighs the heads by their counts, which differ at the ends of answers.
        evaluated["eval_loss_h1"] + 0.8 * evaluated["eval_loss_h2"], rel=0.15,
    )  # fmt: skip


def worsening(patch, before=0):
    """Let every evaluation be worse than the one before, also than those ``before`` a kill."""
    original, figures = medusa_train.trainer.heads_quality, iter(range(before, 100))
    patch.setattr(
        medusa_train.trainer,
        "heads_quality",
        lambda *args: original(*args) | {"tokens_per_step": 2 - next(figures) / 100},
    )


def test_the_best_checkpoint_is_kept_and_taken(train, monkeypatch):
    worsening(monkeypatch)
    job = train()
    best = load_file(job.folder.stage("train") / "checkpoint-3" / "model.safetensors")
    for name, tensor in weights(job).items():
        if name != "draft_token_ids":
            assert torch.equal(tensor, best[f"heads.heads.{name}"]), name
    assert result(job)["best_step"] == 3
    assert result(job)["best_tokens_per_step"] == 2


def test_early_stopping_is_remembered_over_a_kill(train, monkeypatch):
    setting = ("training.early_stopping_patience=2", "training.num_train_epochs=4")
    with monkeypatch.context() as patch:
        worsening(patch)
        unbroken = train(*setting, name="unbroken")
    assert result(unbroken)["optimizer_steps"] == 9
    with monkeypatch.context() as patch:
        worsening(patch)
        train_and_kill(train, patch, 8, *setting)
    with monkeypatch.context() as patch:
        worsening(patch, before=2)
        patch.setattr(medusa_train.train_stage, "save_heads", lambda *_, **__: kill())
        with pytest.raises(Killed):
            train(*setting)
    resumed = train(*setting)
    assert result(resumed) == result(unbroken)
    assert_same_weights(resumed, unbroken)


def test_a_run_killed_after_its_last_step_takes_no_other(train, monkeypatch):
    setting = ("training.num_train_epochs=1.5",)
    unbroken = train(*setting, name="unbroken")
    with monkeypatch.context() as patch:
        patch.setattr(medusa_train.train_stage, "save_heads", lambda *_, **__: kill())
        with pytest.raises(Killed):
            train(*setting)
    resumed = train(*setting)
    assert result(resumed) == result(unbroken)
    assert_same_weights(resumed, unbroken)


def damage_cache(folder, value):
    path = folder / "cache" / "train" / "shard-00000.safetensors"
    tensors = load_file(path)
    tensors["hidden"][1, 0] = value
    write_shard(path, tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_training_before_the_step(train, cached, monkeypatch, value):
    shutil.copytree(cached.parent / "run", train.folder)
    damage_cache(train.folder, value)
    with monkeypatch.context() as patch:
        steps = []
        at_optimizer_step(patch, 1, lambda: steps.append(1))
        with pytest.raises(UserError, match=r"stopped before step \d+: the loss is (nan|inf) .*: 00000:1\)"):
            train()
    for checkpoint in (train.folder / "train").glob("checkpoint-*"):
        assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values())
    assert not (train.folder / "heads").exists()


def test_a_gradient_that_is_no_number_is_not_applied(train, monkeypatch):
    original = medusa_train.trainer.HeadsTrainer.training_step

    def overflowing(self, model, *rest):
        loss = original(self, model, *rest)
        if self.state.global_step == 4:
            next(model.parameters()).grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(medusa_train.trainer.HeadsTrainer, "training_step", overflowing)
    with pytest.raises(UserError, match=r"before step 5: the gradient's norm is (inf|nan); checkpoint-3 is kept"):
        train()


def test_more_heads_than_the_longest_answer_are_refused(train, cached):
    shutil.copytree(cached.parent / "run", train.folder)
    for path in (train.folder / "cache" / "train").glob("*.safetensors"):  # answers of two tokens
        tensors = load_file(path)
        tensors["ends"] = torch.minimum(tensors["ends"], torch.arange(len(tensors["ends"])) // 2 * 2 + 2)
        write_shard(path, tensors)
    with pytest.raises(UserError, match=r"num_heads=2, but the longest training answer has 2 tokens.*num_heads=1"):
        train()
    assert result(train("heads.num_heads=1"))["optimizer_steps"]


@pytest.mark.parametrize(("changes", "told"), [({}, "another backbone"), ({"hidden_size": 64}, "width 32")])
def test_a_cache_of_another_backbone_is_refused(train, tiny_chat_folder, tmp_path, monkeypatch, changes, told):
    other = shutil.copytree(tiny_chat_folder, tmp_path / "other")
    make_llama(seed=7, vocab_size=512, **changes).save_pretrained(other)
    load = medusa_train.job.load_backbone
    monkeypatch.setattr(medusa_train.job, "load_backbone", lambda source, *rest: load(str(other), *rest))
    with pytest.raises(UserError, match=f"cache was made by another backbone .*{told if changes else ''}"):
        train()


def test_a_checkpoint_of_other_heads_is_refused(train, monkeypatch):
    train_and_kill(train, monkeypatch, 5)
    path = train.folder / "train" / "checkpoint-3" / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if not name.startswith("heads.heads.1.")}, path)
    with pytest.raises(UserError, match=r"other heads than the recipe describes: heads.heads.1.0.linear.bias is None"):
        train()


def test_another_number_of_processes_is_refused(train, monkeypatch):
    train_and_kill(train, monkeypatch, 5)
    checkpoint = train.folder / "train" / "checkpoint-3"
    shutil.copy(checkpoint / "rng_state.pth", checkpoint / "rng_state_0.pth")
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_1.pth")
    with pytest.raises(UserError, match="was written by 2 processes, this launch has 1; launch 2 again"):
        train()


def test_only_heads_learn(train, monkeypatch):
    trainers, original = [], medusa_train.train_stage.train_heads
    monkeypatch.setattr(
        medusa_train.train_stage, "train_heads", lambda *args: trainers.append(original(*args)) or trainers[-1]
    )
    seen = set()  # parameters that ever had a gradient
    at_every_step = torch.optim.AdamW.step

    def watching(self, *args, **kwargs):
        seen.update(id(p) for group in self.param_groups for p in group["params"] if p.grad is not None)
        assert all(p.grad is None for p in job_backbone[0].model.parameters())
        return at_every_step(self, *args, **kwargs)

    job_backbone, load = [], medusa_train.job.load_backbone

    def loading(*args):
        job_backbone.append(load(*args))
        before.update({name: tensor.clone() for name, tensor in job_backbone[0].model.state_dict().items()})
        return job_backbone[0]

    before = {}
    monkeypatch.setattr(torch.optim.AdamW, "step", watching)
    monkeypatch.setattr(medusa_train.job, "load_backbone", loading)
    job = train()
    after = job.backbone.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert not any(parameter.requires_grad for parameter in job.backbone.model.parameters())
    trainer = trainers[0]
    of_heads = {id(parameter) for parameter in trainer.model.heads.parameters()}
    assert seen == of_heads
    assert {id(parameter) for parameter in trainer.optimizer.optimizer.state} == of_heads


def test_people_see_losses_speed_and_tokens_per_step(train, capfd):
    train()
    told = "".join(capfd.readouterr())
    assert "tokens/step · loss" in told
    line = next(line for line in told.splitlines() if line.startswith("step 5/"))
    assert all(part in line for part in ("· loss ", " h1 ", " h2 ", " tokens/step ", " positions/s ", " left"))
    assert "{'loss'" not in told


def test_a_tracker_without_its_package_is_refused_before_any_work(cached, command, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    outcome = command("quickstart", "training.report_to=wandb", "--recipe", cached, "--out", tmp_path / "new")
    assert_refused(outcome, "training.report_to=wandb", "pip install 'medusa-train[wandb]'")
    assert not [path for path in (tmp_path / "new").glob("*") if path.is_dir()]


def test_wandb_gets_the_loss_of_every_head(train, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged, original = {}, wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "log", lambda self, data, *a, **k: (logged.update(data), original(self, data, *a, **k))
    )
    train("training.report_to=wandb")
    wandb.finish()
    assert {"train/loss", "train/loss_h1", "train/loss_h2", "eval/tokens_per_step"} <= logged.keys()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_tensorboard_gets_the_loss_of_every_head(train):
    job = train("training.report_to=tensorboard")
    content = b"".join(path.read_bytes() for path in job.folder.path.rglob("*tfevents*"))
    assert all(tag in content for tag in (b"train/loss_h2", b"eval/tokens_per_step", b"eval/top5_h1"))


def test_trackio_gets_the_loss_of_every_head(cached, train, tmp_path):
    """In a process of its own: trackio reads where to write when it is imported."""
    shutil.copytree(cached.parent / "run", train.folder)
    command = [
        sys.executable, "-m", "medusa_train.train", str(cached), f"output_dir={train.folder}",
        "training.report_to=trackio",
    ]  # fmt: skip
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    (database,) = (tmp_path / "trackio").glob("medusa-train*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        logged = [json.loads(metrics) for (metrics,) in connection.execute("SELECT metrics FROM metrics")]
    assert {"train/loss", "train/loss_h1", "train/loss_h2", "eval/tokens_per_step"} <= {
        key for row in logged for key in row
    }
