"""Converted copies of GGUF files.

transformers parses a GGUF file several times and dequantizes it in Python, which takes half a minute even for a small
model. What it made is kept as safetensors and tokenizer files in the user's cache folder and loads in a second. A copy
takes the disk of the whole model in the dtype that was asked for. It may be deleted at any time and is made again when
it is damaged; where none can be written, every load converts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import transformers
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from medusa_train.inference.files import write_json

Part = TypeVar("Part", PreTrainedModel, PreTrainedTokenizerBase)
_MANIFEST = "copy.json"  # written last: names and sizes of the other files


def load_through_copy(gguf: Path, name: str, load: Callable[[Path], Part], convert: Callable[[], Part]) -> Part:
    """A part of a GGUF file, from its copy if there is a whole one, else converted and kept.

    A copy belongs to the file's content, wherever it lies, and to the installed version of transformers.

    Args:
        name: which part, and how converted; tells copies of one file apart.
        load: reads the folder of a copy.
        convert: reads the GGUF file.
    """
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    folder = cache_folder() / f"{gguf.stem}-{digest}-{name}-transformers-{transformers.__version__}"
    if _is_whole(folder):
        try:
            return load(folder)
        except (OSError, ValueError, SafetensorError):
            pass  # damaged in a way that sizes do not show
    part = convert()
    try:
        _keep(part, folder)
    except (OSError, ValueError, RuntimeError, SafetensorError):
        pass  # no room, no right to write, or no form to save: every load converts
    else:
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
        if size > 0.1:
            tqdm.write(f"{gguf.name}: a converted copy ({size:.1f} GB) is kept in {folder}", file=sys.stderr)
    return part


def cache_folder() -> Path:
    """Where copies are: in ``HF_HOME``, else ``XDG_CACHE_HOME``, else ``~/.cache``."""
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "medusa-train"


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _keep(part: PreTrainedModel | PreTrainedTokenizerBase, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-", ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / folder.name
        part.save_pretrained(str(made))
        paths = list(made.iterdir())
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        write_json(made / _MANIFEST, {path.name: path.stat().st_size for path in paths})
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
