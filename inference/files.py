"""Writing files so that a reader, or a resumed run, never sees half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary sibling of ``path``, then move it into place.

    A failure (full disk, Ctrl-C) removes the temporary file and leaves what was there before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: str | Path, content: Any) -> None:
    """Write indented JSON atomically; NaN is refused, since JSON has none."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        temporary.touch()
        readable = temporary.stat().st_mode
        save_file(whole, temporary, metadata)
        temporary.chmod(readable)  # safetensors makes files that only their owner may read

    write_atomically(path, write)
