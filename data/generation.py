"""Batched plain generation, shared by prompt synthesis and distillation: the decode loop with nothing drafted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_train.inference.backbone import Backbone
from medusa_train.inference.decode import StateSink, decode
from medusa_train.inference.drafters import NoDrafter
from medusa_train.inference.model import make_verifier
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.step import Step
from medusa_train.inference.stopping import Stopping


def generate_batch(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int | Sequence[int] = 0,
    states: StateSink | None = None,
) -> list[list[int]]:
    """Continue every prompt, greedily at temperature 0; each one's new ids, up to and including its first end token.

    Args:
        seed: of one stream of draws for the batch, or of one per prompt, whose text then does not depend on the others.
        states: gets the hidden states that the ids were chosen from.
    """
    if isinstance(seed, int):
        generators = [torch.Generator(backbone.device).manual_seed(seed)] * len(prompts)
    else:
        generators = [torch.Generator(backbone.device).manual_seed(each) for each in seed]
    verify = make_verifier(None, temperature, {"top_k": top_k})
    answers: list[list[int]] = [[] for _ in prompts]
    for blocks in decode(
        Step(backbone),
        NoDrafter(),
        verify,
        [torch.tensor(list(prompt)) for prompt in prompts],
        Stopping(max_new_tokens, eos_token_ids),
        DecodeStats(),
        generators=generators,
        states=states,
    ):
        for answer, block in zip(answers, blocks, strict=True):
            answer += block.tokens
    return answers
