"""Batched generation with transformers, shared by prompt synthesis and distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_train.inference.backbone import Backbone


def generate_batch(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue every prompt; the new ids of each, up to and including its first end token.

    Prompts are padded on the left and masked by length, so any id may serve as padding, an end id included.
    """
    longest = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        if temperature > 0
        else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    )
    torch.manual_seed(seed)  # transformers' generate draws from the global generator
    with torch.inference_mode():
        sequences = backbone.model.generate(
            input_ids=input_ids.to(backbone.device),
            attention_mask=attention_mask.to(backbone.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
            **sampling,
        )
    return [cut_at_end(ids, eos_token_ids) for ids in sequences[:, longest:].tolist()]


def cut_at_end(ids: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Everything up to and including the first end token."""
    end = next((i for i, token in enumerate(ids) if token in eos_token_ids), None)
    return ids if end is None else ids[: end + 1]
