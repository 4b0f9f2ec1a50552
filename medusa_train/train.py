"""The training stage alone, for ``accelerate launch -m medusa_train.train RECIPE [section.field=value ...]``.

It needs the ``cache`` stage of the same recipe. Every rank runs this file; rank 0 writes.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from medusa_train.inference.errors import UserError
from medusa_train.recipe import load_recipe
from medusa_train.reporting import reporting_errors


def main() -> None:
    """Train the recipe named on the command line; ``--overwrite`` and ``--debug`` as in ``medusa-train train``."""
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--debug")]
    with reporting_errors(debug="--debug" in sys.argv):
        if not words:
            raise UserError("usage: accelerate launch -m medusa_train.train RECIPE [section.field=value ...]")
        recipe = load_recipe(words[0], words[1:])
        rank = join_ranks(recipe.backbone.device)
        try:
            from medusa_train.job import Job
            from medusa_train.stages import run_stages

            job = Job(recipe)
            with job.folder.locked() if rank == 0 else nullcontext():
                run_stages(job, ["train"], overwrite="--overwrite" in sys.argv)
        except UserError as error:
            raise UserError(f"rank {rank}: {error}" if rank else str(error)) from error
        leave_ranks()


def join_ranks(device: str) -> int:
    """Meet the other processes of the launch, if there are any; the rank of this one.

    Args:
        device: `backbone.device` of the recipe; processes on CPUs talk over gloo, on GPUs over NCCL.

    Raises:
        UserError: the launch asks for DeepSpeed, which is not installed, or for FSDP on CPUs.
    """
    from accelerate import PartialState
    from accelerate.utils import is_deepspeed_available, parse_flag_from_env
    from transformers.utils import logging

    from medusa_train.inference.backbone import resolve_device

    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if deepspeed and not is_deepspeed_available():
        raise UserError("this launch uses DeepSpeed; run: pip install 'medusa-train[deepspeed]'")
    on_cpu = resolve_device(device) == "cpu"
    if on_cpu and parse_flag_from_env("ACCELERATE_USE_FSDP"):  # accelerate would run plain DDP and not say so
        raise UserError("FSDP runs on GPUs only; launch with cpu.yaml")
    # Without being told, accelerate does not see the other processes on CPUs; DeepSpeed it starts only if not told.
    state = PartialState(cpu=on_cpu and not deepspeed)
    if not state.is_main_process:
        logging.disable_progress_bar()
    rank: int = state.process_index
    return rank


def leave_ranks() -> None:
    """Close the connections to the other processes."""
    from accelerate import PartialState

    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
