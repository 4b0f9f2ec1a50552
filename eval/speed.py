"""Time, measured so that it can be defended: of runs that take turns (see `collect`), and of steps.

A *decoder* is a way of decoding a batch of prompts greedily with a budget: transformers' ``generate``, what people use
today, or our loop with some drafter (with `NoDrafter`, one token per pass). A run's clock starts when its first tokens
are there, so prefill is apart; tokens are counted from generated ids.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from medusa_train.inference.backbone import Backbone
from medusa_train.inference.drafters import Drafter, NoDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.stopping import Block
from medusa_train.inference.tree import Tree

WARM_UP_TOKENS = 8


@dataclass
class Run:
    """A batch decoded once in one way.

    Attributes:
        ids: per row, generated token ids, the first end token included.
        prefill_seconds: until the first tokens.
        decode_seconds: from the first tokens to the last.
        blocks: per pass, what each row emitted; empty for ``generate``.
        stats: what the steps emitted (its times only for our loop).
    """

    ids: list[list[int]]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    blocks: list[list[Block]] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)

    @property
    def step_tokens(self) -> int:
        """Tokens after those of prefill."""
        return self.stats.step_tokens


class Timed(Protocol):
    """What has a speed."""

    @property
    def step_tokens(self) -> int: ...

    @property
    def decode_seconds(self) -> float: ...


Decoder = Callable[[Sequence[Tensor], int], Run]  # (prompts (T_b,), budget) -> what came of it


def drafter_decoder(model: MedusaModel, drafter: Drafter) -> Decoder:
    """Our loop with this drafter."""

    def run(prompts: Sequence[Tensor], max_new_tokens: int) -> Run:
        run, device = Run([[] for _ in prompts]), model.backbone.device
        start = first = now(device)
        for blocks in model.stream_batch(prompts, max_new_tokens, drafter=drafter, stats=run.stats):
            if not run.blocks:
                first = now(device)
            run.blocks.append(blocks)
        run.prefill_seconds, run.decode_seconds = first - start, now(device) - first
        run.ids = [[token for blocks in run.blocks for token in blocks[row].tokens] for row in range(len(prompts))]
        return run

    return run


def generate_decoder(backbone: Backbone, options: Mapping[str, Any]) -> Decoder:
    """Transformers' ``generate`` with its own cache, and these keywords more."""

    def run(prompts: Sequence[Tensor], max_new_tokens: int) -> Run:
        width, eos = max(map(len, prompts)), backbone.eos_token_ids
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):  # padded on the left, as generate wants it
            input_ids[row, width - len(prompt) :] = prompt
            attention_mask[row, width - len(prompt) :] = 1
        input_ids, attention_mask = input_ids.to(backbone.device), attention_mask.to(backbone.device)
        clock, start = _Clock(backbone.device), now(backbone.device)
        with torch.inference_mode():
            sequences = backbone.model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(eos) or None,
                pad_token_id=0,
                streamer=clock,
                **options,
            )
        run = Run([_up_to_end(row, eos) for row in sequences[:, width:].tolist()])
        run.prefill_seconds, run.decode_seconds = clock.marks[1] - start, clock.marks[-1] - clock.marks[1]
        left = [len(row) for row in run.ids]
        for number, size in enumerate(clock.sizes[1:]):
            taken = [min(size, room) for room in left]
            left = [room - count for room, count in zip(left, taken, strict=True)]
            if number == 0:
                run.stats.prefill_tokens = sum(taken)
            else:
                run.stats.passes += 1
                run.stats.histogram.update(count for count in taken if count)
        return run

    return run


@dataclass(frozen=True)
class Spread:
    """A figure over repeats."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def decode_speed(repeat: Sequence[Timed]) -> float:
    """Decode tokens per second of one repeat: all its tokens after the first ones / all its decode time.

    Raises:
        UserError: every answer ended with its first token.
    """
    tokens, seconds = sum(run.step_tokens for run in repeat), sum(run.decode_seconds for run in repeat)
    if not tokens:
        raise UserError("every answer ended with its first token, so there is no speed to measure; use other prompts")
    return tokens / seconds


def measure_step_seconds(
    model: MedusaModel, cells: Sequence[tuple[Tree, Sequence[Tensor]]], steps: int, rounds: int
) -> list[list[float]]:
    """Seconds of one whole step (draft, pass, verify, commit); the root alone is plain decoding.

    Rounds go over all cells in turn, so that a burst of other work, which outlasts a step, hits them alike.

    Args:
        cells: trees, each with the prompts that are decoded together.

    Returns:
        Per cell, the median step of every round; `step_curve.fit_step_times` makes one time of them.
    """
    medians: list[list[float]] = [[] for _ in cells]
    device = model.backbone.device
    with tqdm(total=(rounds + 1) * len(cells), desc="step times", unit="tree") as bar:
        for turn in range(rounds + 1):
            for (tree, prompts), found in zip(cells, medians, strict=True):
                drafter = NoDrafter() if tree.size == 1 else model.medusa_drafter(tree)
                timed = steps if turn else 1  # the first round warms up
                budget = timed * (tree.depth + 1) + 1
                blocks = model.stream_batch(prompts, budget, eos_token_ids=(), max_steps=timed, drafter=drafter)
                marks = [now(device) for _ in blocks]
                if turn:
                    found.append(statistics.median(b - a for a, b in pairwise(marks)))
                bar.update()
    return medians


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Clock(BaseStreamer):
    """Notes when tokens arrive and how many; transformers puts the prompt first, then a pass's tokens."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks, self.sizes = device, list[float](), list[int]()

    def put(self, value: Tensor) -> None:
        self.marks.append(now(self.device))
        self.sizes.append(value.shape[1] if value.dim() == 2 else 1)  # (1, n) when assisted, else (B,)

    def end(self) -> None:
        pass


def _up_to_end(ids: list[int], eos: Collection[int]) -> list[int]:
    end = next((place + 1 for place, token in enumerate(ids) if token in eos), len(ids))
    return ids[:end]
