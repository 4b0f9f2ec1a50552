"""Heads of other tools, read into a checkpoint of ours.

Names that are read: ``{head}.{layer}.linear.{weight,bias}`` and ``{head}.{layers}.weight`` (FasterDecoding, TGI),
``blocks.{head}.layers.{layer}.{weight,bias}`` and ``lm_heads.{head}.weight`` (vLLM), with or without
``medusa_head.`` or ``medusa_heads.`` in front. Two layouts share these names: projections of each head's *own*
(FasterDecoding v1, TGI v1) and the backbone's *shared* one (FasterDecoding v2, TGI v2), where the file leaves them out
or, for vLLM, holds one copy.

A folder comes from anywhere, so nothing but tensors is unpickled, no file is opened because another one names it, and
sizes come from tensors that are there, never from a config.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.formats import PICKLED_WEIGHTS, new_folder
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import CONFIG, MOST_TOKENS, WEIGHTS, local_folder, save_heads
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_json
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import HeadsConfig

_BASE = "base_model_name_or_path"
_BLOCK = re.compile(r"(?:(\d{1,3})\.(\d{1,3})\.linear|blocks\.(\d{1,3})\.layers\.(\d{1,3}))\.(weight|bias)")
_PROJECTION = re.compile(r"(?:(\d{1,3})\.(\d{1,3})|lm_heads\.(\d{1,3}))\.weight")
# What a config may call the two numbers; vLLM's own names mean the backbone's where the others are there.
_STATED = {
    "heads": (("medusa_num_heads", "num_medusa_heads"), ("num_heads",)),
    "layers": (("medusa_num_layers", "num_medusa_layers"), ("num_hidden_layers",)),
}


def import_heads(source: str | Path, out: str | Path, backbone: Backbone | None = None) -> list[str]:
    """Turn heads of another tool into a checkpoint of ours; nothing is unpickled but tensors, nothing is guessed.

    Args:
        source: a folder or Hub repository with vLLM's, TGI's or FasterDecoding's files.
        out: a folder that does not exist yet, or is empty.
        backbone: whose heads these are; needed where neither the tensors nor the config show its vocabulary.

    Returns:
        What was found to differ from what the source says of itself, a sentence each.

    Raises:
        UserError: the layout is none of these, or incomplete (the tensor is named); a file holds more than tensors; the
            backbone has other sizes.
    """
    out = new_folder(out)
    folder = local_folder(source, ["*.safetensors", "*.pt", "*.bin", CONFIG])
    content = _read_config(folder)
    found = _read_layout(_read_weights(folder), folder)
    notes = _compare(found, content, folder)
    ids = found.token_ids
    own = _projections(found, content, folder, backbone)
    hidden = len(found.blocks[0, 0, "weight"]) if own is None else own[0].shape[1]
    vocab = len(own[0]) if own and ids is None else _vocab_size(content, backbone, folder)
    if ids is not None and not (len(ids.unique()) == len(ids) and 0 <= int(ids.min()) <= int(ids.max()) < vocab):
        raise UserError(f"{folder}: token_map does not name {len(ids)} different tokens of a vocabulary of {vocab}")
    if backbone and (hidden, vocab) != (backbone.hidden_size, backbone.vocab_size):
        raise UserError(
            f"{folder} holds heads for a backbone with hidden size {hidden} and vocabulary {vocab}, "
            f"{backbone.source} has {backbone.hidden_size} and {backbone.vocab_size}"
        )
    for what, holds in (("hidden_size", hidden), ("vocab_size", vocab)):
        if content.get(what, holds) != holds:
            raise UserError(f"{folder} holds heads of {what} {holds}, but {CONFIG} says {content[what]}; correct it")
    config = HeadsConfig(
        found.num_heads, found.num_layers, hidden, vocab, 0 if ids is None else len(ids),
        lm_head="shared" if own is None else "own",
    )  # fmt: skip
    with torch.device("meta"):  # shapes alone: the tensors themselves are taken over
        heads = MedusaHeads(config)
    state: dict[str, Tensor] = {"draft_token_ids": torch.arange(vocab) if ids is None else ids}
    for (head, layer, part), tensor in found.blocks.items():
        state[f"heads.{head}.{layer}.linear.{part}"] = tensor
        state.setdefault(f"heads.{head}.{layer}.linear.bias", tensor.new_zeros(hidden))  # where there are none
    for head, projection in enumerate(own or ()):
        state[f"heads.{head}.{found.num_layers}.weight"] = projection
    for name, parameter in heads.state_dict().items():
        if state[name].shape != parameter.shape:
            raise UserError(
                f"{folder}: {name.removeprefix('heads.')} has shape {tuple(state[name].shape)}, expected "
                f"{tuple(parameter.shape)}"
            )
    heads.load_state_dict(state, assign=True)
    heads.to(reduce(torch.promote_types, (tensor.dtype for name, tensor in state.items() if name != "draft_token_ids")))
    save_heads(out, heads, backbone)
    if backbone is None:
        written = json.loads((out / CONFIG).read_text(encoding="utf-8"))
        write_json(out / CONFIG, written | {_BASE: str(content.get(_BASE) or "")})
    return notes


@dataclass
class _Layout:
    """Tensors by what they are.

    Attributes:
        blocks: (head, layer, "weight" or "bias") -> tensor.
        projections: head -> tensor; one head's alone may stand for all.
        shared: vLLM's own name for one projection of all heads.
        token_ids: vLLM's ``token_map``.
    """

    blocks: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    projections: dict[int, Tensor] = field(default_factory=dict)
    shared: Tensor | None = None
    token_ids: Tensor | None = None

    @property
    def num_heads(self) -> int:
        return 1 + max([*(head for head, _, _ in self.blocks), *self.projections], default=-1)

    @property
    def num_layers(self) -> int:
        return 1 + max((layer for _, layer, _ in self.blocks), default=-1)


def _read_layout(tensors: dict[str, Tensor], folder: Path) -> _Layout:
    found, ends = _Layout(), dict[int, int]()
    for name, tensor in tensors.items():
        key = re.sub(r"^medusa_heads?\.", "", name)
        if match := _BLOCK.fullmatch(key):
            head, layer = (int(number) for number in match.groups()[:4] if number is not None)
            _keep(found.blocks, (head, layer, match[5]), tensor, name, folder)
        elif match := _PROJECTION.fullmatch(key):
            head = int(match[1] if match[3] is None else match[3])
            _keep(found.projections, head, tensor, name, folder)
            if match[2] is not None:
                ends[head] = int(match[2])
        elif key == "lm_head.weight" and found.shared is None:
            found.shared = tensor
        elif key == "token_map" and tensor.numel() and not tensor.is_floating_point():
            found.token_ids = tensor.long().flatten()
            continue
        elif key == "draft_token_ids":
            raise UserError(f"{folder} is a checkpoint of medusa-train already; use it as it is")
        else:
            raise UserError(
                f"{folder}: tensor {name} belongs to no layout of heads (FasterDecoding, TGI or vLLM); "
                "name the folder of the heads, not that of a whole model"
            )
        if tensor.numel() == 0 or not tensor.is_floating_point():
            raise UserError(f"{folder}: tensor {name} is empty or holds no floating-point numbers ({tensor.dtype})")
    heads = {head for head, _, _ in found.blocks} | found.projections.keys()
    if not heads:
        raise UserError(f"{folder} holds no heads")
    if absent := [head for head in range(max(heads)) if head not in heads]:
        raise UserError(f"{folder} holds head {max(heads)}, but not head {absent[0]}; the file is incomplete")
    for head in range(found.num_heads):
        for layer in range(found.num_layers):
            if (head, layer, "weight") not in found.blocks:
                raise UserError(f"{folder}: head {head} lacks its layer {layer} ({head}.{layer}.linear.weight)")
        if ends.get(head, found.num_layers) != found.num_layers:
            raise UserError(
                f"{folder}: the projection {head}.{ends[head]}.weight stands behind {found.num_layers} layers; "
                "one of them does not belong"
            )
    biased = sum(part == "bias" for _, _, part in found.blocks)
    if 0 < biased < found.num_heads * found.num_layers:
        raise UserError(f"{folder}: only {biased} of {found.num_heads * found.num_layers} layers have a bias")
    return found


def _keep(kept: dict[Any, Tensor], key: object, tensor: Tensor, name: str, folder: Path) -> None:
    if key in kept:
        raise UserError(f"{folder}: tensor {name} is there twice, under two names")
    kept[key] = tensor


def _projections(
    found: _Layout, content: dict[str, Any], folder: Path, backbone: Backbone | None
) -> list[Tensor] | None:
    """A projection for every head; None if all end in the backbone's, which is then not kept."""
    given, one, ids = found.projections, found.shared, found.token_ids
    if content.get("original_lm_head") and one is None and list(given) == [0]:  # vLLM keeps its copy there
        one, given = given[0], {}
    if given and (one is not None or content.get("original_lm_head")):
        raise UserError(
            f"{folder} says that its heads share one lm_head, but holds projections of their own "
            f"(head {', '.join(map(str, sorted(given)))}); correct original_lm_head in {CONFIG}"
        )
    if one is None and not given:
        return None
    if missing := [head for head in range(found.num_heads) if one is None and head not in given]:
        raise UserError(
            f"{folder} has the layout with projections of each head's own (FasterDecoding v1, TGI v1), but head "
            f"{missing[0]} has none; the file is incomplete"
        )
    if one is not None and backbone is not None:
        theirs = backbone.projection_rows().cpu()
        if one.shape == theirs.shape and torch.equal(one.to(theirs), theirs):
            return None
    rows = [given[head] if one is None else one.clone() for head in range(found.num_heads)]
    if any(tensor.dim() != 2 for tensor in rows):
        raise UserError(f"{folder}: the projections are no matrices")
    if ids is not None and len(ids) < len(rows[0]) and int(ids.max()) < len(rows[0]):
        rows = [tensor[ids] for tensor in rows]  # as vLLM does when the file holds every row
    return rows


def _compare(found: _Layout, content: dict[str, Any], folder: Path) -> list[str]:
    """The tensors are right; what the config says less is noted, what it says more is refused."""
    notes, path = [], folder / CONFIG
    for what, holds in (("heads", found.num_heads), ("layers", found.num_layers)):
        ours, theirs = (
            {int(content[key]) for key in keys if isinstance(content.get(key), int)} for keys in _STATED[what]
        )
        stated = ours or theirs
        if len(stated) > 1:
            raise UserError(f"{path} names two numbers of {what}, {sorted(stated)}; correct it")
        for number in stated - {holds}:
            if what == "layers" or number > holds:
                raise UserError(f"{folder} holds {holds} {what}, but {CONFIG} says {number}; one of them is wrong")
            notes.append(f"{CONFIG} says {number} heads, the weights hold {holds}: all {holds} were taken")
    if content.get("medusa_fc_bias") is False and any(part == "bias" for _, _, part in found.blocks):
        notes.append(f"{CONFIG} says that there are no biases, which vLLM follows; the weights hold them: kept")
    return notes


def _vocab_size(content: dict[str, Any], backbone: Backbone | None, folder: Path) -> int:
    """The whole vocabulary, where no projection shows it."""
    size = content.get("vocab_size", backbone.vocab_size if backbone else None)
    if size is None:
        raise UserError(
            f"{folder} has a layout that does not show the vocabulary's size (a shared lm_head, as in FasterDecoding "
            f"v2 and TGI v2, or a token_map), and {CONFIG} does not give it; use --backbone"
        )
    if not isinstance(size, int) or not 0 < size <= MOST_TOKENS:
        raise UserError(f"{folder / CONFIG}: vocab_size {size!r} is no size of a vocabulary; correct it")
    return size


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor in a folder; which files are read never depends on what a file says."""
    named = [folder / name for name in (WEIGHTS, PICKLED_WEIGHTS) if (folder / name).is_file()]
    files = named[:1] or sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    if not files:
        raise UserError(f"{folder} holds no weights (*.safetensors, *.bin or *.pt)")
    tensors: dict[str, Tensor] = {}
    for file in files:
        part = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickled(file)
        if twice := sorted(tensors.keys() & part.keys()):
            raise UserError(f"{folder}: tensor {twice[0]} is in two files; leave one of them")
        tensors |= part
    return tensors


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({error}); copy it again") from error
    return tensors


def _read_pickled(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is damaged, or holds more than tensors and could run code; it is left alone"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({' '.join(str(error).split())[:100]}); copy it again") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise UserError(f"{file} holds no tensors by name")
    return content


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no {CONFIG}; name the folder of the heads") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a config: expected an object")
    return content
