"""Heads as other engines read them; `import_heads` is the way back.

One portable folder serves vLLM, Text Generation Inference and FasterDecoding/Medusa: the tensor names of the last one
(``{head}.{layer}.linear.{weight,bias}`` and ``{head}.{layers}.weight``), biases always there, and a ``config.json``
without ``architectures``, which would make TGI take it for a whole model. Heads that share the backbone's projection
leave theirs out; vLLM wants one copy of it, under the first head's name. Engines differ in what they can carry, and
most load what they cannot carry without a word and then draft nonsense, so that is refused here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from medusa_train.inference.backbone import load_backbone
from medusa_train.inference.checkpoint import CONFIG, WEIGHTS, load_heads
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_atomically, write_json, write_tensors
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import HeadsConfig

Engine = Literal["vllm", "tgi", "fasterdecoding"]
NAMES: dict[Engine, str] = {"vllm": "vLLM", "tgi": "TGI", "fasterdecoding": "FasterDecoding/Medusa"}
PICKLED_WEIGHTS = "medusa_lm_head.pt"  # the only file that FasterDecoding's own inference reads
FASTERDECODING_HEADS = 5  # its loader makes this many, whatever the config says


def export_heads(
    source: str | Path, out: str | Path, engine: Engine, backbone: str = "", pad_vocabulary: bool = False
) -> list[str]:
    """Write a folder that an engine loads.

    Args:
        source: a checkpoint, or a Hub repository of one.
        out: a folder that does not exist yet, or is empty.
        backbone: name of the backbone to write into the config; by default the one that the heads name.
        pad_vocabulary: give heads with a reduced vocabulary a row for every token, see `pad_projection`.

    Returns:
        How to use the folder, a line each.

    Raises:
        UserError: the engine cannot carry these heads, or ``out`` holds something already.
    """
    out = new_folder(out)
    checkpoint = load_heads(source)
    heads, name = checkpoint.heads, NAMES[engine]
    config, base = heads.config, backbone or checkpoint.backbone_source
    if config.kind != "medusa" or config.reads_copies:
        what = f"has no {config.kind} heads" if config.kind != "medusa" else "looks up no copies for heads to read"
        raise UserError(f"{source}: {name} {what}; for serving, train with heads.kind=medusa heads.reads_copies=false")
    if checkpoint.adapter and not backbone:
        raise UserError(
            f"{source}: the heads are for a backbone with an adapter, which {name} does not merge; merge it "
            "(recipes/README.md, Medusa-2) and name the result with --backbone"
        )
    shared = config.lm_head == "shared"
    if shared and engine == "fasterdecoding":
        raise UserError(f"{source}: {name} gives every head a projection; train with heads.lm_head=own")
    if shared and engine == "tgi" and config.num_layers > 1:
        raise UserError(
            f"{source}: the heads have {config.num_layers} layers, but {name} takes one where the lm_head is shared; "
            "train with heads.num_layers=1"
        )
    if config.draft_vocab_size and not shared and not pad_vocabulary:
        raise UserError(
            f"{source}: the heads draft {config.draft_vocab_size} of {config.vocab_size} tokens, which {name} cannot "
            "load; train with heads.draft_vocab_size=0, or use --pad-vocabulary (the same drafts from larger files)"
        )
    if engine == "fasterdecoding" and config.num_layers > 1:
        raise UserError(
            f"{source}: the heads have {config.num_layers} layers, but {name} gives all layers of a head the same "
            "weights; train with heads.num_layers=1"
        )
    if engine != "vllm" and (not base or "://" in base or base.endswith(".gguf")):
        raise UserError(
            f"{name} loads the backbone that the config names, and these heads name {base or 'none'!r}; "
            "use --backbone with a Hub id or a folder"
        )
    tensors = portable_tensors(heads)
    if shared and engine == "vllm":
        # vLLM does not take the projection from its own backbone; without a copy it drafts nonsense.
        if not base:
            raise UserError(f"{source} does not name its backbone, whose projection {name} needs; use --backbone")
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")  # as the heads, on every machine
        loaded = load_backbone(base, dtype, device="cpu")
        loaded.check_probe(checkpoint.probe, str(source))
        tensors[f"0.{config.num_layers}.weight"] = loaded.projection_rows()
    write_tensors(out / WEIGHTS, tensors, {"format": "pt"})
    if engine == "fasterdecoding":
        write_atomically(out / PICKLED_WEIGHTS, lambda temporary: torch.save(tensors, temporary))
    write_json(out / CONFIG, portable_config(config, base))
    return _advice(engine, config, base, out)


def portable_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """FasterDecoding's names; projections over the whole vocabulary, if the heads have some of their own."""
    config, tensors = heads.config, {}
    for name, tensor in heads.state_dict().items():
        if name == "draft_token_ids" or name.startswith("shared."):
            continue
        key = name.removeprefix("heads.")
        if config.draft_vocab_size and key.split(".")[1] == str(config.num_layers):
            tensor = pad_projection(tensor, heads.draft_token_ids, config.vocab_size)
        tensors[key] = tensor.detach().cpu().contiguous()
    return tensors


def pad_projection(rows: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """A projection of the whole vocabulary with the same best token: ``(V', hidden)`` -> ``(vocab, hidden)``.

    Tokens that the head cannot draft get the mean of its rows. Their logit is then the mean of the others' logits,
    never above the largest, so an engine that drafts each head's best token drafts what the head would.
    """
    padded = rows.float().mean(dim=0).to(rows.dtype).repeat(vocab_size, 1)
    padded[token_ids] = rows
    return padded


def portable_config(config: HeadsConfig, backbone: str) -> dict[str, Any]:
    """``config.json`` of an exported folder: every name under which an engine looks for the same two numbers."""
    return {
        "model_type": "medusa",
        "base_model_name_or_path": backbone,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "num_medusa_heads": config.num_heads,
        "num_medusa_layers": config.num_layers,
        "medusa_fc_bias": True,  # without it vLLM drops the biases, silently
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "version": "2",
    } | ({"original_lm_head": True} if config.lm_head == "shared" else {})


def new_folder(out: str | Path) -> Path:
    """``out``, if nothing is there yet.

    Raises:
        UserError: it is a file, or a folder that holds something.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; name a new folder")
    return out


def _advice(engine: Engine, config: HeadsConfig, backbone: str, out: Path) -> list[str]:
    if engine == "vllm":
        how = json.dumps({"method": "medusa", "model": str(out), "num_speculative_tokens": config.num_heads})
        return [f"vllm serve BACKBONE --speculative-config '{how}'"]
    if engine == "tgi":
        return [f"text-generation-launcher --model-id {out}"]
    if config.num_heads == FASTERDECODING_HEADS:
        return []
    return [
        f"its loader makes {FASTERDECODING_HEADS} heads whatever {CONFIG} says, and these are {config.num_heads}; "
        "set medusa_num_heads in its medusa_model.py"
    ]
