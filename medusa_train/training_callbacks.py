"""What happens beside the training steps: lines for people, a clean stop when the machine is taken away, trackers."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from medusa_train.inference.errors import UserError

TRACKERS = ("wandb", "tensorboard", "trackio")


def check_tracker(report_to: str) -> None:
    """Refuse a tracker that cannot work, before any work is done.

    Raises:
        UserError: the name is unknown, or its package is missing.
    """
    if report_to != "none" and importlib.util.find_spec(report_to) is None:
        raise UserError(
            f"training.report_to={report_to} needs a package that is missing; run: "
            f"pip install 'medusa-train[{report_to}]'"
        )


class ConsoleProgress(TrainerCallback):
    """A bar with the steps, and one line for people whenever the Trainer logs or evaluates."""

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self.started = self.tokens_per_step = 0.0
        self.first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="train", unit="step")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.bar is None or not logs:
            return
        if "eval_tokens_per_step" in logs:
            self.tokens_per_step = logs["eval_tokens_per_step"]
            tqdm.write(evaluation_line(logs, state.global_step, state.max_steps))
        elif "loss" in logs:
            done = max(1, state.global_step - self.first_step)
            left = (time.monotonic() - self.started) / done * (state.max_steps - state.global_step)
            tqdm.write(training_line(logs, state.global_step, state.max_steps, self.tokens_per_step, left))

    def close(self) -> None:
        """End the bar, also after an error, so that the next line starts at the margin."""
        if self.bar is not None:
            self.bar.close()


def training_line(logs: Mapping[str, Any], step: int, steps: int, tokens_per_step: float, seconds_left: float) -> str:
    """``step 40/528 · loss 2.89 · h1 1.92 h2 2.61 · 1.84 tokens/step · 1,420 positions/s · 00:47 left``."""
    parts = [f"step {step}/{steps}", f"loss {logs['loss']:.3f}", _by_head(logs, "loss_h{}", "{:.2f}")]
    parts += [f"KL to base {logs['kl_to_base']:.2g}"] if "kl_to_base" in logs else []
    parts += [f"{tokens_per_step:.2f} tokens/step"] if tokens_per_step else []
    parts += [f"{logs['positions_per_second']:,.0f} positions/s", f"{tqdm.format_interval(seconds_left)} left"]
    return " · ".join(parts)


def evaluation_line(logs: Mapping[str, Any], step: int, steps: int) -> str:
    """``step 200/528 · calibration: 1.84 tokens/step · loss 3.01 · top-1/5 h1 .33/.58 h2 .17/.39``.

    Where answers are decoded as well, ``1.84 tokens/step, 1.79 decoded``.
    """
    decoded = logs.get("eval_decoded_tokens_per_step")
    best, five = ({f"h{k}": logs[f"eval_top{n}_h{k}"] for k in _heads(logs, f"eval_top{n}_h")} for n in (1, 5))
    recall = " ".join(f"{head} {best[head]:.2f}/{five[head]:.2f}" for head in best)
    return (
        f"step {step}/{steps} · calibration: {logs['eval_tokens_per_step']:.3f} tokens/step"
        f"{f', {decoded:.3f} decoded' if decoded else ''} · "
        f"loss {logs['eval_loss']:.3f} · top-1/5 {recall}"
    )


def _heads(logs: Mapping[str, Any], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in logs if name.startswith(prefix))


def _by_head(logs: Mapping[str, Any], name: str, form: str) -> str:
    heads = _heads(logs, name.format(""))
    return " ".join(f"h{head} {form.format(logs[name.format(head)])}" for head in heads)


class StopOnSigterm(TrainerCallback):
    """On SIGTERM, finish the step, save and stop; ``stopped`` tells afterwards.

    transformers has ``enable_jit_checkpoint`` for this. It waits three seconds first, in which a short run ends, and
    nothing tells a stopped run from a finished one.
    """

    def __init__(self) -> None:
        self.asked = self.stopped = False
        self._before: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before = signal.signal(signal.SIGTERM, self._ask)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._anyone_asked(args) or state.global_step >= state.max_steps:
            return
        self.stopped = True
        control.should_save = control.should_training_stop = True

    def restore(self) -> None:
        """Put back what SIGTERM did before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _anyone_asked(self, args: TrainingArguments) -> bool:
        if args.world_size == 1:
            return self.asked
        # Ranks hear the signal at different moments, and have to stop after the same step.
        asked = torch.tensor(float(self.asked), device=args.device)
        torch.distributed.all_reduce(asked)
        return bool(asked > 0)


class RememberBest(TrainerCallback):
    """Find the best checkpoint again after a resume: its path as stored is of no use once the folder has moved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.best_global_step:
            return
        best = self.folder / f"checkpoint-{state.best_global_step}"
        if best.exists():
            state.best_model_checkpoint = str(best)
        else:  # it was damaged: the best is to be found among those that are left
            state.best_model_checkpoint = state.best_metric = state.best_global_step = None
