"""Which checkpoint of a training run to go on from: the newest that is whole, and that belongs to this launch."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from torch import Size
from tqdm import tqdm

from medusa_train.inference.errors import UserError

STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
_OF_ONE_PROCESS = (STATE, WEIGHTS, "optimizer.pt", "scheduler.pt")


def last_whole_checkpoint(folder: Path, sharded: bool) -> Path | None:
    """The newest checkpoint that was written to its end; damaged ones are passed over, said so and removed.

    Every rank calls this. Damaged checkpoints do not stay: the Trainer would later write over their files one by one,
    and a kill in between would leave a mixture of two steps.

    Args:
        sharded: whether DeepSpeed or FSDP writes weights and optimizer, under names of their own.
    """
    with PartialState().main_process_first():  # the main process removes, the others find what it left
        for checkpoint in sorted(folder.glob("checkpoint-*"), key=_step, reverse=True):
            fault = _fault(checkpoint, () if sharded else _OF_ONE_PROCESS)
            if fault is None:
                return checkpoint
            tqdm.write(f"train: warning: {checkpoint} is damaged ({fault}); removed, the one before it is used")
            shutil.rmtree(checkpoint)
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The Trainer's own record in a checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def check_world_size(checkpoint: Path, world_size: int) -> None:
    """Refuse to go on with another number of processes.

    The global batch, and with it every later step, would be another one.

    Raises:
        UserError: the checkpoint was written by more or fewer processes.
    """
    wrote = 1 if (checkpoint / "rng_state.pth").exists() else len(list(checkpoint.glob("rng_state_*.pth")))
    if wrote != world_size:
        raise UserError(
            f"{checkpoint} was written by {_processes(wrote)}, this launch has {world_size}; launch {wrote} again, "
            "or use --overwrite with another training.per_device_train_batch_size to train anew"
        )


def check_shapes(checkpoint: Path, wanted: Mapping[str, Size]) -> None:
    """Compare a checkpoint's weights with the heads that are to be trained.

    The Trainer itself loads what fits and leaves the rest as it is.

    Raises:
        UserError: a tensor is missing, extra or of another shape; it is named.
    """
    with safe_open(checkpoint / WEIGHTS, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118, no mapping
    for name in sorted(found.keys() | wanted.keys()):
        ours = tuple(wanted[name]) if name in wanted else None
        if found.get(name) != ours:
            raise UserError(
                f"{checkpoint / WEIGHTS} holds other heads than the recipe describes: {name} is {found.get(name)} "
                f"there and {ours} here; remove {checkpoint.parent} to train anew, or use another --out"
            )


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _processes(number: int) -> str:
    return f"{number} process" + ("es" if number != 1 else "")


def _fault(checkpoint: Path, needed: tuple[str, ...]) -> str | None:
    """What is wrong with the files of a checkpoint, read without loading any of them."""
    if missing := [name for name in (STATE, *needed) if not (checkpoint / name).exists()]:
        return f"{missing[0]} is missing"
    if not any(checkpoint.glob("rng_state*.pth")):
        return "rng_state.pth is missing"
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):  # refuses a file that is shorter than its header says
                    pass
            elif path.suffix in (".pt", ".pth", ".bin"):
                with zipfile.ZipFile(path) as archive:  # what torch.save writes; its checksums tell
                    if broken := archive.testzip():
                        return f"{path.name} is corrupt at {broken}"
        except (ValueError, SafetensorError, zipfile.BadZipFile) as error:
            return f"{path.name} is cut off or corrupt: {' '.join(str(error).split())[:80]}"
    state = read_state(checkpoint)
    if not isinstance(state, dict) or state.get("global_step") != _step(checkpoint):
        return f"{STATE} is not of this step"
    return None
