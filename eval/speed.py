"""Time, measured so that it can be defended: one process, one model object, interleaved, with repeats.

Three ways of decoding the same prompts greedily with the same budget:

- ``generate``: `transformers` generation with its own cache, what people use today;
- ``plain``: our decode loop, one token per pass;
- ``medusa``: our decode loop with heads and tree.

A run's clock starts when its first token is there, so prefill is apart (time to first token); tokens are counted from
generated ids. The first round warms up and is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from medusa_train.inference.drafters import MedusaDrafter, NoDrafter
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.stopping import Block
from medusa_train.inference.tree import Tree

ARMS = ("generate", "plain", "medusa")


@dataclass
class Run:
    """One prompt decoded once in one way.

    Attributes:
        ids: generated token ids.
        prefill_seconds: until the first token.
        decode_seconds: from the first token to the last.
        blocks: what was emitted together; empty for ``generate``.
    """

    ids: list[int]
    prefill_seconds: float
    decode_seconds: float
    blocks: list[Block] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first, i.e. those that the decode clock covers."""
        return max(0, len(self.ids) - 1)


def run_arm(model: MedusaModel, arm: str, prompt: Tensor, max_new_tokens: int) -> Run:
    """Decode one prompt greedily in one of `ARMS`."""
    if arm == "generate":
        return _run_generate(model, prompt, max_new_tokens)
    stats, blocks = DecodeStats(), list[Block]()
    drafter = NoDrafter() if arm == "plain" else model.drafter
    start = first = _now(model)
    for block in model.stream(prompt, max_new_tokens, drafter=drafter, stats=stats):
        if not blocks:
            first = _now(model)
        blocks.append(block)
    end = _now(model)
    return Run([token for block in blocks for token in block.tokens], first - start, end - first, blocks, stats)


def measure_arms(
    model: MedusaModel, prompts: Sequence[Tensor], max_new_tokens: int, repeats: int
) -> dict[str, list[list[Run]]]:
    """Runs by arm, then repeat, then prompt.

    Arms take turns on every prompt, in an order that rotates, so that a slow minute of the machine hits all of them.
    """
    runs: dict[str, list[list[Run]]] = {arm: [[] for _ in range(repeats)] for arm in ARMS}
    warm_up = min(8, max_new_tokens)
    with tqdm(total=repeats * len(prompts) * len(ARMS), desc="eval", unit="run") as bar:
        for arm in ARMS:
            run_arm(model, arm, prompts[0], warm_up)
        for repeat in range(repeats):
            for number, prompt in enumerate(prompts):
                for turn in range(len(ARMS)):
                    arm = ARMS[(turn + number + repeat) % len(ARMS)]
                    runs[arm][repeat].append(run_arm(model, arm, prompt, max_new_tokens))
                    bar.update()
    return runs


@dataclass(frozen=True)
class Spread:
    """A figure over repeats."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def decode_speed(repeat: Sequence[Run]) -> float:
    """Decode tokens per second of one repeat: all its tokens / all its decode time."""
    return sum(run.decode_tokens for run in repeat) / sum(run.decode_seconds for run in repeat)


def speedup(over: Sequence[Sequence[Run]], of: Sequence[Sequence[Run]]) -> Spread:
    """Ratio of decode speeds, repeat by repeat (each pair ran interleaved)."""
    return Spread.of([decode_speed(ours) / decode_speed(base) for ours, base in zip(of, over, strict=True)])


def mean_prompt_speedup(over: Sequence[Sequence[Run]], of: Sequence[Sequence[Run]]) -> float:
    """Spec-Bench's convention: the ratio of per-prompt mean speeds, over all repeats."""

    def mean(repeats: Sequence[Sequence[Run]]) -> float:
        return statistics.fmean(
            run.decode_tokens / run.decode_seconds for rep in repeats for run in rep if run.decode_tokens
        )

    return mean(of) / mean(over)


def measure_step_seconds(
    model: MedusaModel, trees: Sequence[Tree], prompt: Tensor, steps: int, rounds: int
) -> list[float]:
    """Time of one whole step (draft, pass, verify, commit) with each tree; the root alone is plain decoding.

    Rounds go over all trees in turn, and a tree's time is its best round's median: other work on the machine only ever
    adds time, in bursts longer than a step.
    """
    medians: list[list[float]] = [[] for _ in trees]
    with tqdm(total=(rounds + 1) * len(trees), desc="step times", unit="tree") as bar:
        for turn in range(rounds + 1):
            for tree, found in zip(trees, medians, strict=True):
                drafter = NoDrafter() if tree.size == 1 else MedusaDrafter(model.heads, tree)
                timed = steps if turn else 1  # the first round warms up
                budget = timed * (tree.depth + 1) + 1
                blocks = model.stream(prompt, budget, eos_token_ids=(), max_steps=timed, drafter=drafter)
                marks = [_now(model) for _ in blocks]
                if turn:
                    found.append(statistics.median(b - a for a, b in pairwise(marks)))
                bar.update()
    return [min(found) for found in medians]


class _TokenClock(BaseStreamer):
    """Notes when tokens arrive; transformers calls `put` with the prompt first, then with each token."""

    def __init__(self, model: MedusaModel) -> None:
        self.model, self.marks = model, list[float]()

    def put(self, value: Any) -> None:
        self.marks.append(_now(self.model))

    def end(self) -> None:
        pass


def _run_generate(model: MedusaModel, prompt: Tensor, max_new_tokens: int) -> Run:
    prompt = prompt.view(1, -1).to(model.backbone.device)
    clock, start = _TokenClock(model), _now(model)
    with torch.inference_mode():
        sequences = model.backbone.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(model.backbone.eos_token_ids) or None,
            pad_token_id=0,
            streamer=clock,
        )
    first, last = clock.marks[1], clock.marks[-1]
    return Run(sequences[0, prompt.shape[1] :].tolist(), first - start, last - first)


def _now(model: MedusaModel) -> float:
    if model.backbone.device.type == "cuda":
        torch.cuda.synchronize(model.backbone.device)
    return time.perf_counter()
