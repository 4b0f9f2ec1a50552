"""The folder of a run: which stage was made by which recipe, and which is done.

Every stage owns one subfolder. ``recipe.json`` in it, written first, holds the part of the recipe that the stage
depends on; ``run.json``, written last, marks it done and says how it was made. A folder made by another recipe is
refused, never mixed with; a stage without ``run.json`` is continued.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import medusa_train
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_json
from medusa_train.recipe import Recipe

_PROMPT_KEYS = (
    "seed", "backbone.source", "backbone.dtype", "backbone.quantization", "backbone.chat_template",
    "data.prompts", "data.prompts_split", "data.num_prompts", "data.prompt_max_tokens", "data.prompt_temperature",
    "data.prompt_top_k", "data.prompt_topics", "data.conversations", "data.batch_size",
)  # fmt: skip
_DISTILL_KEYS = (
    *_PROMPT_KEYS, "data.answer_tokens", "data.max_new_tokens", "data.max_length", "data.calibration_share",
    "data.heldout_share", "data.backend", "data.server.model", "data.server.api", "data.temperatures",
    "data.drop_mismatched",
)  # fmt: skip
_TRAIN_KEYS = (*_DISTILL_KEYS, "data.cache_dtype", "heads", "training", "lora")
_TREE_KEYS = (*_TRAIN_KEYS, "inference")
# Stage -> the recipe keys that its output depends on, in the order of the stages.
STAGE_KEYS: dict[str, tuple[str, ...]] = {
    "prompts": _PROMPT_KEYS,
    "distill": _DISTILL_KEYS,
    "cache": (*_DISTILL_KEYS, "data.cache_dtype", "training.mode"),
    "train": _TRAIN_KEYS,
    "tree": _TREE_KEYS,
    "eval": (*_TREE_KEYS, "eval"),
}


class RunFolder:
    """One run on disk."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.output_dir)

    def stage(self, name: str) -> Path:
        """The subfolder of a stage."""
        return self.path / name

    @property
    def heads(self) -> Path:
        """The heads checkpoint: weights from ``train``, tree from ``tree``, card from ``eval``."""
        return self.path / "heads"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second command out of the folder.

        Raises:
            UserError: the folder cannot be written, or another command works in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(f"another medusa-train works in {self.path}; wait for it or use another --out") from error
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}; use another --out") from error
        try:
            yield
        finally:
            lock.release()

    def done(self, stage: str) -> bool:
        return (self.stage(stage) / "run.json").exists()

    def check(self, stages: Sequence[str], overwrite: bool) -> None:
        """Compare what is in the folder with the recipe before any work.

        With ``overwrite``, the first stage that differs and all behind it are removed.

        Raises:
            UserError: a stage was made by another recipe (the difference is named), or is not ours.
        """
        for name in stages:
            folder = self.stage(name)
            if not folder.exists() or (folder.is_dir() and self._is_bare(name)):
                continue
            try:
                made_by = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
            except (OSError, json.JSONDecodeError) as error:
                raise UserError(
                    f"{folder} holds files that are no run of medusa-train; move them or use another --out"
                ) from error
            if name == "train" and self._trains_longer(made_by):
                self._reopen_training()
                return
            difference = _difference(made_by, self._part(name))
            if difference and not overwrite:
                raise UserError(
                    f"{folder} was made with {difference}; use --overwrite to make it and what follows anew, "
                    "or another --out"
                )
            if difference:
                self.remove_from(name)
                return

    def _trains_longer(self, made_by: dict[str, Any]) -> bool:
        """Whether more epochs are all that the recipe asks for beyond what ``train`` was begun with."""
        wanted, key = self._part("train"), "training.num_train_epochs"
        return bool(made_by | {key: wanted[key]} == wanted and made_by.get(key, 0) < wanted[key])

    def _reopen_training(self) -> None:
        """Let ``train`` go on from its last checkpoint; what was made of the shorter training is removed."""
        self.remove_from("tree")
        (self.stage("train") / "run.json").unlink(missing_ok=True)
        self.begin("train")

    def remove_from(self, stage: str) -> None:
        """Remove the output of a stage and of all that build on it."""
        names = list(STAGE_KEYS)
        for name in names[names.index(stage) :]:
            shutil.rmtree(self.stage(name), ignore_errors=True)
        if names.index(stage) <= names.index("train"):
            shutil.rmtree(self.heads, ignore_errors=True)

    def _is_bare(self, stage: str) -> bool:
        """Whether a stage wrote nothing but, at most, the note of its recipe."""
        return all(path.name == "recipe.json" for path in self.stage(stage).iterdir())

    def abandon(self, stage: str) -> None:
        """Leave no trace of a stage that failed before it wrote anything."""
        if self.stage(stage).is_dir() and self._is_bare(stage):
            shutil.rmtree(self.stage(stage))

    def begin(self, stage: str) -> Path:
        """Note which recipe a stage is made by; returns its folder."""
        folder = self.stage(stage)
        write_json(folder / "recipe.json", self._part(stage))
        return folder

    def finish(self, stage: str, started: float, inputs: Sequence[Path], result: dict[str, Any]) -> None:
        """Mark a stage done and say how it was made; ``started`` is a `time.time`."""
        record = {
            "stage": stage,
            "result": result,
            "recipe": self.recipe.model_dump(),
            "inputs": {str(path.relative_to(self.path)): file_hash(path) for path in inputs},
            "wall_seconds": round(time.time() - started, 1),
            "peak_memory_gb": peak_memory_gb(),
            "environment": environment(),
        }
        write_json(self.stage(stage) / "run.json", record)

    def result(self, stage: str) -> dict[str, Any]:
        """What a finished stage recorded.

        Raises:
            UserError: the stage is not done.
        """
        try:
            record: dict[str, Any] = json.loads((self.stage(stage) / "run.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{self.path} has no finished {stage} stage; run medusa-train {stage} first") from error
        return record

    def _part(self, stage: str) -> dict[str, Any]:
        whole = self.recipe.model_dump()
        part: dict[str, Any] = {}
        for key in STAGE_KEYS[stage]:
            value: Any = whole
            for name in key.split("."):
                value = value[name]
            if isinstance(value, dict):
                part.update({f"{key}.{name}": field for name, field in value.items()})
            else:
                part[key] = value
        return part


def _difference(made_by: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    for key in {**made_by, **wanted}:
        if made_by.get(key) != wanted.get(key):
            return f"{key}={made_by.get(key)}, the recipe says {wanted.get(key)}"
    return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file, or of the files in a folder in name order."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.name != "run.json":
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def peak_memory_gb() -> float:
    """Highest resident memory of this process so far, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 2)


def environment() -> dict[str, Any]:
    """Versions and hardware that a result depends on."""
    import torch

    names = ("torch", "transformers", "accelerate", "datasets", "tokenizers")
    return {
        "medusa_train": medusa_train.__version__,
        "git_revision": _git_revision(),
        **{name: importlib.metadata.version(name) for name in names},
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
