"""A recipe's stages in this process, or in every process of an ``accelerate launch``.

Rank 0 holds the folder's lock and writes what belongs to the run; the others write their own shards of answers and
hidden states, and wait.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta

from medusa_train.inference.errors import UserError
from medusa_train.recipe import Recipe
from medusa_train.run_folder import RunFolder

LONGEST_SHARE = timedelta(days=7)  # for which ranks wait for the slowest; no answer of a model comes in minutes


def run_recipe(recipe: Recipe, last: str, overwrite: bool = False, retry_failed: bool = False) -> None:
    """Run the stages of a recipe up to ``last``, see `stages.run_stages`.

    Raises:
        UserError: as there; on other ranks than 0 it begins with the rank.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # While heads are trained, a rank that hangs is better found soon.
    only_training = last == "train" and not overwrite and RunFolder(recipe).done("cache")
    check_launcher(recipe.backbone.device)
    rank = join_ranks(recipe.backbone.device, None if only_training else LONGEST_SHARE) if launched else 0
    try:
        from medusa_train.job import Job
        from medusa_train.stages import run_stages

        job = Job(recipe, retry_failed)
        with job.folder.locked() if rank == 0 else nullcontext():
            run_stages(job, last, overwrite)
    except UserError as error:
        raise UserError(f"rank {rank}: {error}" if rank else str(error)) from error
    if launched:
        leave_ranks()


def check_launcher(device: str) -> None:
    """Refuse what this launch cannot do, before the processes meet.

    Args:
        device: `backbone.device` of the recipe.

    Raises:
        UserError: it asks for DeepSpeed, which is not installed, or for FSDP on CPUs.
    """
    from accelerate.utils import is_deepspeed_available, parse_flag_from_env

    from medusa_train.inference.backbone import resolve_device

    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and not is_deepspeed_available():
        raise UserError("this launch uses DeepSpeed; run: pip install 'medusa-train[deepspeed]'")
    # Accelerate would run plain DDP and not say so.
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and resolve_device(device) == "cpu":
        raise UserError("FSDP runs on GPUs only; launch with cpu.yaml")


def join_ranks(device: str, patience: timedelta | None = None) -> int:
    """Meet the other processes of the launch, if there are any; the rank of this one.

    Args:
        device: `backbone.device` of the recipe; processes on CPUs talk over gloo, on GPUs over NCCL.
        patience: how long they wait for one another; None is the library's.

    """
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env
    from transformers.utils import logging

    from medusa_train.inference.backbone import resolve_device

    on_cpu, deepspeed = resolve_device(device) == "cpu", parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    # Without being told, accelerate does not see the other processes on CPUs; DeepSpeed it starts only if not told.
    state = PartialState(cpu=on_cpu and not deepspeed, **({"timeout": patience} if patience else {}))
    if not state.is_main_process:
        logging.disable_progress_bar()
    rank: int = state.process_index
    return rank


def leave_ranks() -> None:
    """Close the connections to the other processes."""
    from accelerate import PartialState

    PartialState().destroy_process_group()
