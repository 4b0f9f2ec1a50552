"""The stages of a run, each a function of a `Job`: prompts, distill, cache, train, tree, eval.

Every stage reads what earlier ones wrote, writes its own subfolder of the run, and can be run again: a finished stage
is left alone, an interrupted one goes on. Asking for a stage makes the missing ones before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from medusa_train.data_stages import reopen_distillation, run_cache, run_distill, run_prompts
from medusa_train.eval_stage import run_eval
from medusa_train.fused_loss import check_liger
from medusa_train.inference.errors import UserError
from medusa_train.job import Job
from medusa_train.train_stage import run_train
from medusa_train.training_callbacks import check_tracker
from medusa_train.tree_stage import run_tree

STAGES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "prompts": run_prompts,
    "distill": run_distill,
    "cache": run_cache,
    "train": run_train,
    "tree": run_tree,
    "eval": run_eval,
}
# Stage -> what it reads, hashed into its run.json.
INPUTS: dict[str, Sequence[str]] = {
    "prompts": (),
    "distill": ("prompts",),
    "cache": ("distill",),
    "train": ("cache",),
    "tree": ("train", "cache"),
    "eval": ("tree", "cache"),
}


MEASURING = ("tree", "eval")  # worth repeating on a quieter machine; the others would come out the same


def run_stages(job: Job, last: str, overwrite: bool = False) -> None:
    """Run the stages up to ``last`` in their order, keeping finished ones; a line tells what became of each.

    Every rank of a launch calls this: rank 0 makes the prompts, all of them share out answers and hidden states, and
    train together.

    Args:
        overwrite: make stages of another recipe anew, and ``last`` if it measures times.

    Raises:
        UserError: the folder belongs to another recipe, or a launch of several processes asks for a stage that
            measures one.
    """
    folder, state = job.folder, PartialState()
    names = list(STAGES)[: list(STAGES).index(last) + 1]
    if state.num_processes > 1 and last in MEASURING:
        raise UserError(f"{last} measures one process; run medusa-train {last} without a launch")
    with state.main_process_first():
        if state.is_main_process:
            folder.check(names, overwrite)
            if overwrite and last in MEASURING and folder.done(last):
                folder.remove_from(last)
            if job.retry_failed:
                reopen_distillation(folder, overwrite)
    if "train" in names and not folder.done("train"):
        check_tracker(job.recipe.training.report_to)
        if job.recipe.training.use_liger_kernel:
            check_liger(job.backbone, job.backbone.device)
    for name in names:
        if folder.done(name):
            if state.is_main_process:
                tqdm.write(f"{name}: done, kept ({folder.stage(name)})")
            continue
        started = time.time()
        try:
            result = STAGES[name](job) if state.is_main_process or name != "prompts" else {}
        except Exception:
            if state.is_main_process:
                folder.abandon(name)
            raise
        state.wait_for_everyone()
        if state.is_main_process:
            folder.finish(name, started, [folder.stage(needed) for needed in INPUTS[name]], result)
            tqdm.write(f"{name}: {_summary(result)} ({time.time() - started:.0f} s)")
        state.wait_for_everyone()


def _summary(result: dict[str, Any]) -> str:
    parts = []
    for key, value in result.items():
        if isinstance(value, float):
            parts.append(f"{key.replace('_', ' ')} {value:.3g}")
        elif value is not None and not isinstance(value, list):
            parts.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)
