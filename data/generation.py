"""Batched generation with transformers, shared by prompt synthesis and distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache

from medusa_train.inference.backbone import Backbone, cache_keyword
from medusa_train.inference.kv_cache import TreeCacheLayer


def generate_batch(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue every prompt, greedily at temperature 0; the new ids of each, up to and including its first end token.

    Prompts are padded on the left and masked by length, so any id may serve as padding, an end id included.
    """
    longest = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    processors = LogitsProcessorList()
    if temperature > 0:
        processors.append(_TopKSampler(temperature, top_k, torch.Generator(backbone.device).manual_seed(seed)))
    input_ids, attention_mask = input_ids.to(backbone.device), attention_mask.to(backbone.device)
    with torch.inference_mode():
        sequences = backbone.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **{cache_keyword(type(backbone.model).forward): _cache(backbone, prompts, longest + max_new_tokens)},
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
            do_sample=False,
            logits_processor=processors,
        )
    return [cut_at_end(ids, eos_token_ids) for ids in sequences[:, longest:].tolist()]


class _TopKSampler(LogitsProcessor):
    """Draws among the k likeliest tokens and leaves only the drawn one, for greedy search to take.

    transformers' own sampling draws noise for the whole vocabulary from the global generator; on a CPU that costs half
    as much as the model's pass, and the run would depend on what else drew from the generator.
    """

    def __init__(self, temperature: float, top_k: int, generator: torch.Generator) -> None:
        self.temperature, self.top_k, self.generator = temperature, top_k, generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores.topk(min(self.top_k or scores.shape[-1], scores.shape[-1]))
        probabilities = (best.values.float() / self.temperature).softmax(dim=-1)
        drawn = best.indices.gather(1, torch.multinomial(probabilities, 1, generator=self.generator))
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


class _GrowingLayer(TreeCacheLayer):
    """Commits what it is given, for generation one token at a time."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        used = super().update(key_states, value_states)
        self.commit(None, key_states.shape[2])
        return used


def _cache(backbone: Backbone, prompts: Sequence[Sequence[int]], capacity: int) -> Cache:
    """A cache allocated once: transformers' own copies all keys and values at every step, a fifth of a batch's time.

    Where all prompts are the same (synthesis), they are read once and repeated for every row.
    """
    num_layers = int(backbone.model.config.get_text_config().num_hidden_layers)
    layers = [_GrowingLayer(capacity) for _ in range(num_layers)]
    cache = Cache(layers=layers)
    if len(prompts[0]) > 1 and all(prompt == prompts[0] for prompt in prompts):
        backbone.hidden_states(torch.tensor([list(prompts[0][:-1])], device=backbone.device), cache)
        for layer in layers:
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = (
                states.repeat_interleave(len(prompts), dim=0) for states in (layer.keys, layer.values)
            )
    return cache


def cut_at_end(ids: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Everything up to and including the first end token."""
    end = next((i for i, token in enumerate(ids) if token in eos_token_ids), None)
    return ids if end is None else ids[: end + 1]
