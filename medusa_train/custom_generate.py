"""Greedy decoding with Medusa heads in plain transformers: one file, without the package that trained them.

Published repositories carry it as ``custom_generate/generate.py``::

    model.generate(input_ids, custom_generate="user/repo", trust_remote_code=True, do_sample=False, max_new_tokens=256)

Every step, the heads propose a tree of tokens behind the last one, the model reads the whole tree in one pass, and the
branch that the model itself would have chosen is kept: the output is that of greedy decoding. One prompt at a
time; the package ``medusa-train`` also samples, takes batches and is faster.
"""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin
from transformers.utils import cached_file

HEADS = ""  # the repository that this file was published in
ADVICE = "; the package medusa-train does this: pip install medusa-train"


def generate(model: Any, inputs: Tensor | None = None, **options: Any) -> Tensor:
    """What ``model.generate`` calls; options are those of transformers.

    Args:
        options: also ``heads``, another repository or folder than this one, and ``revision``, for the heads too.

    Returns:
        ``(1, T + new)`` token ids.
    """
    source, revision = options.pop("heads", HEADS), options.pop("revision", None)
    if options.get("assistant_model") is not None:
        raise NotImplementedError("assistant_model: the heads are the assistant; leave it out")
    key = (source, revision, model.device, model.dtype)
    if getattr(model, "_medusa_heads", (None,))[0] != key:
        model._medusa_heads = (key, load_heads(source, revision, model))
    heads = model._medusa_heads[1]
    streamer = options.get("streamer")
    decoded: Tensor = GenerationMixin.generate(
        model, inputs, custom_generate=partial(decode, heads=heads, streamer=streamer), **options
    )
    return decoded


class Heads:
    """The heads and their tree.

    A node of the tree is a path of ranks: ``(r1, ..., rd)`` is the r_d-th best token of head d, below its parent; the
    root ``()`` is the last token that the model chose.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], paths: list[list[int]], model: Any) -> None:
        nodes = {tuple(path[:depth]) for path in paths for depth in range(len(path) + 1)} | {()}
        self.paths = sorted(nodes, key=lambda path: (len(path), path))
        place = {path: node for node, path in enumerate(self.paths)}
        self.lines = [[place[path[:depth]] for depth in range(len(path) + 1)] for path in self.paths]
        self.children: list[list[int]] = [[] for _ in self.paths]
        for node, line in enumerate(self.lines[1:], start=1):
            self.children[line[-2]].append(node)
        self.depths = torch.tensor([len(path) for path in self.paths], device=model.device)
        self.sees = torch.zeros(len(self.paths), len(self.paths), dtype=torch.bool, device=model.device)
        for node, line in enumerate(self.lines):
            self.sees[node, line] = True
        self.tensors, self.embed = tensors, model.get_input_embeddings()
        self.layers, self.kind = config["medusa_num_layers"], config["model_type"]
        self.num_heads, self.reads_copies = config["medusa_num_heads"], config.get("reads_copies", False)
        ids = tensors.get("draft_token_ids")
        self.token_ids = range(config["vocab_size"]) if ids is None else ids.tolist()
        projection = model.get_output_embeddings().weight  # what heads without one of their own end in
        self.shared = projection if ids is None else projection[ids]

    def draft(self, hidden: Tensor, root: int, copy: list[int]) -> list[int]:
        """A token for every node; ``hidden`` ``(hidden,)`` chose ``root``, and ``copy`` is what may follow it."""
        tokens = [root] * len(self.paths)
        for depth in range(len(self.paths[-1])):
            parents = [node for node, path in enumerate(self.paths) if len(path) == depth and self.children[node]]
            before = [[tokens[node] for node in self.lines[parent]] for parent in parents]
            logits = self.logits(depth, hidden, before[:1] if self.kind == "medusa" else before, copy)
            ranks = 1 + max(self.paths[child][-1] for parent in parents for child in self.children[parent])
            best = logits.topk(ranks).indices.tolist()
            for row, parent in enumerate(parents):
                for child in self.children[parent]:
                    tokens[child] = self.token_ids[best[0 if self.kind == "medusa" else row][self.paths[child][-1]]]
        return tokens

    def logits(self, head: int, hidden: Tensor, before: list[list[int]], copy: list[int]) -> Tensor:
        """One head's projections, ``(rows, vocabulary)``; all but Medusa heads read the rows of tokens before."""
        x = hidden.expand(len(before), -1)
        readings: list[list[Tensor]] = [[]]
        if self.kind == "hydra":  # all tokens at once
            readings = [[self.embedded(before).to(x).flatten(-2)]]
        elif self.kind == "recurrent":  # one after the other, by the same weights at every depth
            head, readings = 0, [[token] for token in self.embedded(before).to(x).unbind(-2)]
        if self.reads_copies:
            copied = self.embedded([self.agreeing(copy, line) for line in before]).to(x)[:, -len(readings) :]
            readings = [[*more, token] for more, token in zip(readings, copied.unbind(-2), strict=True)]
        for more in readings:
            for layer in range(self.layers):
                weight, bias = (self.tensors[f"{head}.{layer}.linear.{name}"] for name in ("weight", "bias"))
                read = torch.cat([x, *more], dim=-1) if layer == 0 else x
                x = x + functional.silu(functional.linear(read, weight, bias))
        return functional.linear(x, self.tensors.get(f"{head}.{self.layers}.weight", self.shared))

    def agreeing(self, copy: list[int], line: list[int]) -> list[int]:
        """The copied token after each of a line's, -1 for none: where the line left the copy, if the heads see that."""
        blind = self.kind == "medusa"
        return [copy[at] if copy and (blind or line[1 : at + 1] == copy[:at]) else -1 for at in range(len(line))]

    def embedded(self, rows: list[list[int]]) -> Tensor:
        """``(rows, columns, hidden)``, each of norm 1 per dimension; zeros for -1."""
        ids = torch.tensor(rows, device=self.embed.weight.device)
        embedded = self.embed(ids.clamp(min=0)) * (ids >= 0)[..., None]
        return functional.rms_norm(embedded, embedded.shape[-1:])


class Copies:
    """A growing text, and what followed each of its words of four to two tokens when they last came."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.follower: dict[tuple[int, ...], int] = {}

    def after(self, text: list[int], count: int) -> list[int]:
        """``count`` tokens, which go on with themselves past the end of the text; none if the last words are new."""
        for token in text[len(self.text) :]:
            for size in (4, 3, 2):
                if size <= len(self.text):
                    self.follower[tuple(self.text[-size:])] = len(self.text)
            self.text.append(token)
        places = (self.follower.get(tuple(text[-size:])) for size in (4, 3, 2) if size <= len(text))
        start = next((place for place in places if place is not None), None)
        if start is None:
            return []
        return [text[start + at % (len(text) - start)] for at in range(count)]


def load_heads(source: str, revision: str | None, model: Any) -> Heads:
    """Heads from a repository or folder, for this model."""
    files = {
        name: Path(cached_file(source, name, revision=revision))
        for name in ("config.json", "tree.json", "medusa_lm_head.safetensors")
    }
    config, tree = (json.loads(files[name].read_text("utf-8")) for name in ("config.json", "tree.json"))
    output = model.get_output_embeddings()
    wanted, found = (config["vocab_size"], config["hidden_size"]), tuple(output.weight.shape)
    if wanted != found:
        raise ValueError(f"the heads in {source} are for a model with an output projection of {wanted}, not {found}")
    kind, copies = config["model_type"], config.get("reads_copies", False)
    if kind not in ("medusa", "hydra", "recurrent") or not isinstance(copies, bool):
        raise ValueError(f"{source}/config.json: heads of kind {kind!r} that read copies {copies!r} are not known here")
    depth, heads = max(map(len, tree["paths"]), default=0), config["medusa_num_heads"]
    if depth > heads:
        raise ValueError(f"the tree in {source} is {depth} deep, but there are {heads} heads")
    tensors = load_file(files["medusa_lm_head.safetensors"], device=str(output.weight.device))
    return Heads(
        config,
        {name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
        tree["paths"],
        model,
    )


def refuse(model: Any, input_ids: Tensor, processors: Any, config: Any, options: dict[str, Any]) -> None:
    """Name what would make the output another than that of greedy decoding."""
    mask, cache = options.get("attention_mask"), options.get("cache", options.get("past_key_values"))
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
    window = getattr(text, "sliding_window", None) if "sliding_attention" in kinds else None
    others = kinds - {"full_attention", "sliding_attention"}
    reasons = {
        "sampling (set do_sample=False)": config.do_sample,
        "beams": config.num_beams > 1,
        "more than one prompt": input_ids.shape[0] > 1,
        "padding": mask is not None and not bool(mask.all()),
        "embeddings instead of tokens": options.get("inputs_embeds") is not None,
        "a cache that is filled already": cache is not None and cache.get_seq_length() > 0,
        "stop_strings": config.stop_strings,
        "return_dict_in_generate": config.return_dict_in_generate,
        "logits processors (" + ", ".join(type(each).__name__ for each in processors) + ")": len(processors) > 0,
        f"layers of kind {', '.join(sorted(others))}": others,
        f"texts longer than the sliding window of {window}": window and config.max_length > window,
        f"attention {text._attn_implementation}": not text._attn_implementation.startswith(("sdpa", "eager")),
    }
    if found := next((name for name, is_so in reasons.items() if is_so), None):
        raise NotImplementedError(f"custom_generate with Medusa heads cannot do {found}" + ADVICE)


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    heads: Heads,
    streamer: Any = None,
    **options: Any,
) -> Tensor:
    """The decoding loop, in the form that transformers calls once it has prepared everything."""
    refuse(model, input_ids, logits_processor, generation_config, options)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, states = DynamicCache(), []
    # The state that the heads read is what the output projection reads.
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, read: states.append(read[0][0]))
    try:
        keep = {"logits_to_keep": 1} if "logits_to_keep" in options else {}
        logits = model(input_ids, use_cache=True, **{keyword: cache}, **keep).logits[0, -1:]
        new, path, copies = logits.argmax(-1).tolist(), [-1], Copies()
        while True:
            for token in new:
                input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], dim=1)
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
                if bool(stopping_criteria(input_ids, None).all()):
                    if streamer is not None:
                        streamer.end()
                    return input_ids
            length = cache.get_seq_length()
            copy = copies.after(input_ids[0].tolist(), heads.num_heads) if heads.reads_copies else []
            drafted = heads.draft(states.pop()[path[-1]], new[-1], copy)
            hidden_from = torch.zeros(len(drafted), length + len(drafted), dtype=model.dtype, device=model.device)
            hidden_from[:, length:].masked_fill_(~heads.sees, torch.finfo(model.dtype).min)
            logits = model(
                input_ids.new_tensor([drafted]),
                attention_mask=hidden_from[None, None],
                # Positions past the end belong to tokens that are never given out.
                position_ids=(length + heads.depths)[None].clamp(max=generation_config.max_length - 1),
                use_cache=True,
                **{keyword: cache},
            ).logits[0]
            chosen, path = logits.argmax(-1).tolist(), [0]
            while (node := _child(heads, drafted, path[-1], chosen[path[-1]])) is not None:
                path.append(node)
            new = [chosen[node] for node in path]
            for layer in cache.layers:
                for kept in (layer.keys, layer.values):
                    kept[:, :, length : length + len(path)] = kept[:, :, [length + node for node in path]]
            if len(path) < len(drafted):
                cache.crop(len(path) - len(drafted))
    finally:
        hook.remove()


def _child(heads: Heads, drafted: list[int], node: int, token: int) -> int | None:
    return next((child for child in heads.children[node] if drafted[child] == token), None)
