"""A heads checkpoint: one folder (or Hub repository) that says everything needed to use it.

``medusa_lm_head.safetensors`` holds ``{head}.{layer}.linear.{weight,bias}`` and ``{head}.{layers}.weight``, the names
of FasterDecoding/Medusa that serving engines read (a recurrent drafter is one head); heads that share the backbone's
projection leave out the latter, and heads with a reduced vocabulary add ``draft_token_ids``.
``config.json`` has no ``architectures`` key (TGI would take the folder for a whole model) and carries the probe of the
backbone that the heads were trained on. ``tree.json`` is optional. Heads that were trained with a LoRA adapter of their
backbone say so in ``config.json`` and carry it in ``adapter/``. Loading is strict: nothing is guessed, nothing is
left random.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.inference.adaptive import Calibration
from medusa_train.inference.backbone import LONGEST_NAME, Backbone
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_json, write_tensors
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import HeadsConfig, HeadsKind, Projection
from medusa_train.inference.tree import Tree

WEIGHTS = "medusa_lm_head.safetensors"
CONFIG = "config.json"
TREE = "tree.json"
ADAPTER = "adapter"
MOST_TOKENS = 1 << 24  # a config that asks for more would only fill the memory
_LAYOUTS = {"own": "projections of their own", "shared": "the backbone's projection"}


@dataclass(frozen=True)
class Checkpoint:
    """Heads as loaded from a folder.

    Attributes:
        heads: the heads, fp32 or as saved, on the CPU.
        tree: the tree stored with them, or None.
        batch_trees: smallest number of prompts -> the tree stored for so many.
        calibration: what adaptive drafting needs, or None.
        backbone_source: the backbone that they were trained on, "" if the folder does not say.
        probe: see `Backbone.check_probe`; None if the folder does not carry one.
        adapter: folder of the LoRA adapter that the backbone needs, or None.
    """

    heads: MedusaHeads
    tree: Tree | None
    batch_trees: Mapping[int, Tree]
    calibration: Calibration | None
    backbone_source: str
    probe: tuple[float, ...] | None
    adapter: Path | None


def save_heads(
    folder: str | Path,
    heads: MedusaHeads,
    backbone: Backbone | None = None,
    tree: Tree | None = None,
    adapted: bool = False,
) -> None:
    """Write a checkpoint; each file appears whole or not at all.

    Args:
        adapted: the backbone is used with the adapter in ``folder/adapter``, which is there already.

    Raises:
        UserError: a parameter is empty or a share of itself, as under ZeRO-3 or FSDP before gathering.
    """
    folder, config = Path(folder), heads.config
    state = {name: t for name, t in heads.state_dict().items() if not name.startswith("shared.")}
    tensors = {name.removeprefix("heads."): tensor.detach().cpu() for name, tensor in state.items()}
    if empty := [name for name, tensor in tensors.items() if tensor.numel() == 0]:
        raise UserError(f"heads: {empty[0]} is empty (sharded?); gather the parameters before saving")
    if not config.draft_vocab_size:
        del tensors["draft_token_ids"]
    for name, shape in expected_shapes(config).items():
        if name not in tensors or tensors[name].shape != shape:
            found = tuple(tensors[name].shape) if name in tensors else "missing"
            raise UserError(f"heads: {name} is {found}, not {shape} (sharded?); gather the parameters before saving")
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    content: dict[str, Any] = {
        "model_type": config.kind,
        "base_model_name_or_path": backbone.source if backbone else "",
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "num_medusa_heads": config.num_heads,
        "num_medusa_layers": config.num_layers,
        "medusa_fc_bias": True,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "original_lm_head": config.lm_head == "shared",
        "reads_copies": config.reads_copies,
        "version": "2",
    }
    if backbone:
        content["backbone_probe"] = list(backbone.probe)
    if adapted:
        content["adapter"] = True
    write_json(folder / CONFIG, content)
    if tree:
        save_tree(folder, tree)


def save_tree(
    folder: str | Path,
    tree: Tree,
    calibration: Calibration | None = None,
    batch_trees: Mapping[int, Tree] | None = None,
    reasons: Mapping[int, str] | None = None,
) -> None:
    """Write ``tree.json``: static trees' paths and, under ``adaptive``, what adaptive drafting needs.

    Args:
        batch_trees: as in `MedusaModel`; written under ``batches``.
        reasons: number of prompts -> why this tree, for people; written as ``chosen_because``.
    """
    why = {rows: {"chosen_because": reason} for rows, reason in (reasons or {}).items()}
    batches = {str(rows): why.get(rows, {}) | own.to_json() for rows, own in (batch_trees or {}).items()}
    content = why.get(1, {}) | tree.to_json() | ({"batches": batches} if batches else {})
    write_json(Path(folder) / TREE, content | ({"adaptive": calibration.to_json()} if calibration else {}))


def load_heads(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Load a checkpoint from a folder or a Hub repository; nothing but tensors and JSON is read, and no code is run.

    Args:
        revision: branch, tag or commit of the repository.

    Raises:
        UserError: a file is missing or damaged; the config and the tensors disagree; a tensor is missing, extra,
            empty or of another shape (named).
    """
    adapter = [f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors"]
    folder = local_folder(source, [WEIGHTS, CONFIG, TREE, *adapter], revision)
    config, content = _read_config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no {WEIGHTS}; name a folder that medusa-train wrote") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} is damaged ({error}); copy or train it again") from error
    _check_tensors(tensors, config, folder)
    ids = tensors.pop("draft_token_ids", None)
    if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise UserError(f"{folder / WEIGHTS}: draft_token_ids names tokens outside the vocabulary")
    heads = MedusaHeads(config, ids)
    heads.to(next(iter(tensors.values())).dtype)
    heads.load_state_dict(
        {f"heads.{name}": tensor for name, tensor in tensors.items()} | {"draft_token_ids": heads.draft_token_ids}
    )
    tree = Tree.load(folder / TREE) if (folder / TREE).exists() else None
    calibration = _read_calibration(folder / TREE) if tree else None
    return Checkpoint(
        heads=heads.eval().requires_grad_(False),
        tree=tree,
        batch_trees=_read_batch_trees(folder / TREE) if tree else {},
        calibration=calibration,
        backbone_source=str(content.get("base_model_name_or_path") or ""),
        probe=_read_probe(content, folder),
        adapter=folder / ADAPTER if content.get("adapter") else None,
    )


def expected_shapes(config: HeadsConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor in a checkpoint with this config."""
    hidden, columns = config.hidden_size, config.projection_size
    shapes: dict[str, tuple[int, ...]] = {"draft_token_ids": (columns,)} if config.draft_vocab_size else {}
    for head in range(config.weight_sets):
        for layer in range(config.num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden, config.input_size(head, layer))
            shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        if config.lm_head == "own":
            shapes[f"{head}.{config.num_layers}.weight"] = (columns, hidden)
    return shapes


def local_folder(source: str | Path, patterns: Sequence[str], revision: str | None = None) -> Path:
    """A folder as it is, or a Hub repository's files of these patterns, downloaded or from the client's cache.

    Raises:
        UserError: neither exists, or the Hub cannot be reached.
    """
    if len(str(source)) > LONGEST_NAME:
        raise UserError(f"heads {str(source)[:40]}…: no folder or repository has so long a name")
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision:
            raise UserError(f"heads {source} is a folder, which has no revision {revision}; leave it out")
        return folder
    name = str(source)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"heads {name}: no such folder")
    from huggingface_hub import errors, snapshot_download

    # ValueError: a repository's or a file's name that the client refuses, such as one that leaves the folder.
    failures = (errors.HTTPError, ValueError, OSError)  # type: ignore[attr-defined]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except failures as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"heads {name}: no such folder, and not to be had from the Hub ({reason})") from error


def _read_batch_trees(path: Path) -> dict[int, Tree]:
    batches = json.loads(path.read_text(encoding="utf-8")).get("batches", {})
    try:
        trees = {int(rows): Tree.from_paths(batch["paths"]) for rows, batch in batches.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: its part 'batches' is damaged ({error!r}); run medusa-train tree --overwrite"
        ) from error
    if trees and min(trees) < 2:
        raise UserError(f"{path}: its part 'batches' names a batch of {min(trees)}; batches have two prompts or more")
    return trees


def _read_calibration(path: Path) -> Calibration | None:
    content = json.loads(path.read_text(encoding="utf-8")).get("adaptive")
    try:
        return Calibration.from_json(content) if content else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: its part 'adaptive' is damaged ({error!r}); run medusa-train tree --overwrite"
        ) from error


def _read_probe(content: dict[str, Any], folder: Path) -> tuple[float, ...] | None:
    try:
        probe = tuple(map(float, content.get("backbone_probe") or ()))
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: backbone_probe must be a list of numbers") from error
    if not all(map(math.isfinite, probe)):  # nothing compares with NaN, so any backbone would pass
        raise UserError(f"{folder / CONFIG}: backbone_probe must be a list of finite numbers")
    return probe or None


def _read_config(folder: Path) -> tuple[HeadsConfig, dict[str, Any]]:
    path = folder / CONFIG
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no {CONFIG}; name a folder that medusa-train wrote") from error
    except (ValueError, RecursionError) as error:  # of text that is not UTF-8, too
        raise UserError(f"{path} is not JSON ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object of keys")
    needed = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
    if missing := [key for key in needed if not _is_count(content.get(key))]:
        raise UserError(f"{path}: {missing[0]} is missing or not a whole number")
    num_heads, num_layers, hidden_size, vocab_size = (int(content[key]) for key in needed)
    kind = content.get("model_type", "medusa")  # heads written elsewhere may not say
    if kind not in get_args(HeadsKind):
        raise UserError(f"{path}: model_type {kind!r}; heads are {', '.join(get_args(HeadsKind))}")
    draft_vocab_size = content.get("draft_vocab_size", 0)
    if not _is_count(draft_vocab_size) or vocab_size > MOST_TOKENS:
        raise UserError(f"{path}: draft_vocab_size or vocab_size is no number of tokens")
    lm_head: Projection = "shared" if content.get("original_lm_head") else "own"
    reads_copies = content.get("reads_copies", False)
    if not isinstance(reads_copies, bool):
        raise UserError(f"{path}: reads_copies must be true or false")
    return (
        HeadsConfig(num_heads, num_layers, hidden_size, vocab_size, draft_vocab_size, kind, lm_head, reads_copies),
        content,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31


def _check_tensors(tensors: dict[str, Tensor], config: HeadsConfig, folder: Path) -> None:
    where = folder / WEIGHTS
    found = {int(match[1]) for name in tensors if (match := re.match(r"(\d+)\.", name))}
    if len(found) != config.weight_sets:
        raise UserError(f"{where} holds {len(found)} heads, but {CONFIG} says {config.weight_sets}; correct {CONFIG}")
    layers = {int(match[1]) for name in tensors if (match := re.match(r"0\.(\d+)\.linear\.weight", name))}
    if len(layers) != config.num_layers:
        raise UserError(f"{where} holds {len(layers)} layers a head, but {CONFIG} says {config.num_layers}")
    projections = {name for name in tensors if re.fullmatch(r"\d+\.\d+\.weight", name)}
    if bool(projections) != (config.lm_head == "own"):
        holds, says = ("own", "shared") if projections else ("shared", "own")
        raise UserError(
            f"{where} holds heads with {_LAYOUTS[holds]}, but {CONFIG} says {_LAYOUTS[says]}; set original_lm_head "
            f"in {CONFIG} to {str(holds == 'shared').lower()} if the tensors are right"
        )
    expected = expected_shapes(config)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UserError(f"{where}: tensor {missing[0]} is missing (medusa-train import reads other layouts)")
    if extra := sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{where}: tensor {extra[0]} does not belong to heads of this config")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{where}: tensor {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
