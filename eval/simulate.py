"""What a step costs, without a trained model: random weights of a real shape, acceptance as given.

Times depend on shapes and not on weights, so a model made from a config alone shows on any device what drafting, a
wider pass and the loop around it cost. Acceptance cannot be had in this way: its histogram is given, and the verifier
is forced to it. It still does the work of greedy verification first, because that work is part of a step.
"""

from __future__ import annotations

import heapq
import random
import statistics
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from medusa_train.eval.speed import Spread, now
from medusa_train.inference.backbone import Backbone, resolve_device, resolve_dtype
from medusa_train.inference.cpu_linear import can_pack, pack_linears
from medusa_train.inference.decode import Verify, decode
from medusa_train.inference.drafters import Context, Drafter, Drafting, MedusaDrafter, NoDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import HeadsConfig
from medusa_train.inference.sampling import Chances
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.step import Step
from medusa_train.inference.stopping import Stopping
from medusa_train.inference.tree import RankPath, Tree
from medusa_train.inference.verify import Draft, Generators, Process, Verdict, verify_greedy

# (hidden, intermediate, layers, heads, key/value heads, vocabulary, tied projection)
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "tiny": (32, 64, 2, 4, 2, 512, True),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, True),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256, True),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256, False),
}
TREE_SIZES = (1, 8, 16, 32, 64)
PROMPT_TOKENS = 128
STEPS = 32
MIN_HEADS = 3
DRAFT_VOCAB_SIZE = 4096  # what recipes train by default
MAX_RANK = 10
PARTS = ("draft", "forward", "verify", "commit")

DEFINITIONS = {
    "step_ms": "time of one whole step (draft, pass, verify, commit): the median of a repeat's steps; the device is "
    "waited for between steps only",
    "ratio": "step_ms / step_ms of the one-token step of the same repeat and batch",
    "parts_ms": "median time of each part, from runs of their own in which the device is waited for between parts",
    "tokens_per_step": "tokens emitted by steps / steps; given by the histogram, not measured",
    "tokens_per_second": "batch size * tokens_per_step / step time",
    "speedup": "tokens_per_step / ratio",
}


def simulate(
    shape: str, histogram: Sequence[float], batch_sizes: Sequence[int], repeats: int, dtype: str = "auto"
) -> dict[str, Any]:
    """Time the steps of every tree size and batch size; see ``DEFINITIONS``.

    Args:
        shape: one of ``SHAPES``.
        histogram: share of steps that accept 0, 1, 2, ... drafts.

    Raises:
        UserError: the device has too little memory for the shape.
    """
    device = resolve_device("auto")
    depth = max(MIN_HEADS, len(histogram) - 1)
    try:
        backbone, heads = random_model(shape, depth, resolve_dtype(dtype, device), device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{device} has too little memory for {shape}; choose a smaller --simulate-shape") from error
    trees = {size: likely_tree(size, depth) for size in TREE_SIZES}
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {
        (batch, size): [] for batch in batch_sizes for size in TREE_SIZES
    }
    order = list(runs)
    with tqdm(total=(repeats + 1) * len(order), desc="simulate", unit="run") as bar:
        for repeat in range(repeats + 1):  # the first round warms up
            for turn in range(len(order)):
                batch, size = order[(turn + repeat) % len(order)]
                deck = accepted_deck(histogram, STEPS * batch, seed=repeat)
                found = _run(backbone, heads, trees[size], deck, batch, seed=repeat)
                if repeat:
                    runs[batch, size].append(found)
                bar.update()
    return {
        "definitions": DEFINITIONS,
        "setting": {
            "shape": shape,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "device": str(backbone.device),
            "num_heads": depth,
            "draft_vocab_size": heads.config.projection_size,
            "prompt_tokens": PROMPT_TOKENS,
            "steps": STEPS,
            "repeats": repeats,
            "accepted_histogram": list(histogram),
            "trees": {str(size): [list(path) for path in tree.paths if path] for size, tree in trees.items()},
        },
        "rows": [_row(batch, size, found, runs[batch, 1]) for (batch, size), found in runs.items()],
    }


def random_model(shape: str, num_heads: int, dtype: torch.dtype, device: str) -> tuple[Backbone, MedusaHeads]:
    """A Llama of this shape and heads for it, made where they stay; laid out as loaded ones would be."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device(device):  # drawn on the device: no copy in host memory, no transfer
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        drafting = MedusaHeads(HeadsConfig(num_heads, 1, hidden, vocabulary, min(DRAFT_VOCAB_SIZE, vocabulary)))
    drafting = drafting.to(dtype).eval().requires_grad_(False)
    if device == "cpu" and can_pack(dtype):
        pack_linears(model, lambda: model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False))
        pack_linears(drafting)
    return Backbone.wrap(model), drafting


def likely_tree(size: int, depth: int) -> Tree:
    """A chain of ``depth`` and, up to ``size`` tokens, the likeliest nodes if rank r is right once in 2 (r + 1)^2."""
    if size == 1:
        return Tree.root_only()
    chosen: set[RankPath] = {(0,) * length for length in range(depth + 1)}
    frontier: list[tuple[float, RankPath]] = [(-1.0, ())]
    while len(chosen) < size:
        chance, path = heapq.heappop(frontier)
        chosen.add(path)
        if len(path) < depth:
            for rank in range(MAX_RANK):
                heapq.heappush(frontier, (chance / (2 * (rank + 1) ** 2), (*path, rank)))
    return Tree.from_paths(chosen)


def accepted_deck(histogram: Sequence[float], count: int, seed: int) -> list[int]:
    """Accepted drafts of ``count`` steps in random order; their shares are the histogram's up to rounding."""
    upper = list(accumulate(histogram[:-1]))  # the last share is what is left of 1
    deck = [bisect(upper, (place + 0.5) / count) for place in range(count)]
    random.Random(seed).shuffle(deck)
    return deck


def parse_histogram(text: str) -> list[float]:
    """``0.5,0.3,0.2`` -> shares of steps that accept 0, 1, 2 drafts.

    Raises:
        UserError: not numbers, not shares that make 1, or more drafts than the smallest tree can hold.
    """
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise UserError(f"--accepted-histogram {text}: give shares like 0.5,0.3,0.2") from error
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-3:
        raise UserError(f"--accepted-histogram {text}: the shares must add up to 1, they make {sum(shares):g}")
    longest = TREE_SIZES[1] - 1
    if len(shares) - 1 > longest:
        raise UserError(
            f"--accepted-histogram {text}: a tree of {TREE_SIZES[1]} can accept {longest} drafts; "
            f"give at most {longest + 1} shares"
        )
    return shares


def force_accepted(tree: Tree, deck: Sequence[int]) -> Verify:
    """Greedy verification that then accepts as many tokens of the chain as the deck says, whatever they are."""
    cards = iter(deck)
    chain = [tree.paths.index((0,) * length) for length in range(tree.depth + 1)]

    def verify(
        logits: Tensor, draft: Draft, rows: Sequence[int], process: Process | None, chances: Sequence[Chances]
    ) -> list[Verdict]:
        verdicts = verify_greedy(logits, draft, rows, process, chances)
        forced = []
        for row, verdict in zip(rows, verdicts, strict=True):
            # Prefill verifies a root alone, and so does plain decoding: neither has a draft to accept.
            accepted = next(cards) if draft.trees[row].size > 1 else 0
            forced.append(Verdict(tuple(chain[: accepted + 1]), verdict.tokens[-1:] * (accepted + 1)))
        return forced

    return verify


def part_seconds(
    step: Step, drafter: Drafter, verify: Verify, prompts: Sequence[Tensor], stopping: Stopping
) -> list[dict[str, float]]:
    """Decode, waiting for the device between the ``PARTS`` of every step; their seconds, step by step.

    `DecodeStats` does not wait, so on a GPU it counts a pass's launch as forward and its execution as verification.
    """
    marks: list[float] = []

    def mark() -> None:
        marks.append(now(step.backbone.device))

    def marked(
        logits: Tensor, draft: Draft, rows: Sequence[int], process: Process | None, chances: Sequence[Chances]
    ) -> list[Verdict]:
        mark()
        verdicts = verify(logits, draft, rows, process, chances)
        mark()
        return verdicts

    steps = []
    for _ in decode(step, _Marked(drafter, mark), marked, prompts, stopping, DecodeStats()):
        mark()
        if len(marks) == len(PARTS) + 1:  # the end of the step before, of drafting, the pass, verification, and now
            steps.append({part: end - start for part, (start, end) in zip(PARTS, pairwise(marks), strict=True)})
        del marks[:-1]
    return steps


@dataclass(frozen=True)
class _Marked:
    """A drafter that calls ``mark`` when it has drafted."""

    drafter: Drafter
    mark: Callable[[], None]

    @property
    def max_size(self) -> int:
        return self.drafter.max_size

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        drafting = self.drafter.start(prompts, max_new_tokens, generators)

        def draft(context: Context) -> Draft:
            drafted = drafting(context)
            self.mark()
            return drafted

        return draft


def _run(
    backbone: Backbone, heads: MedusaHeads, tree: Tree, deck: Sequence[int], batch: int, seed: int
) -> dict[str, Any]:
    """One repeat of one tree: the steps as they are, then again with the parts apart."""
    generator = torch.Generator().manual_seed(seed)
    prompts = list(torch.randint(backbone.vocab_size, (batch, PROMPT_TOKENS), generator=generator))
    drafter: Drafter = NoDrafter() if tree.size == 1 else MedusaDrafter(heads, tree)
    stopping = Stopping(STEPS * (tree.depth + 1) + 1, max_steps=STEPS)
    stats = DecodeStats()
    blocks: Iterator[Any] = decode(Step(backbone), drafter, force_accepted(tree, deck), prompts, stopping, stats)
    marks = [now(backbone.device) for _ in blocks]
    parts = part_seconds(Step(backbone), drafter, force_accepted(tree, deck), prompts, stopping)
    return {
        "step_ms": statistics.median(end - start for start, end in pairwise(marks)) * 1000,
        "parts_ms": {part: statistics.median(step[part] for step in parts) * 1000 for part in PARTS},
        "steps": stats.steps,
        "step_tokens": stats.step_tokens,
    }


def _row(batch: int, size: int, runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    per_step = sum(run["step_tokens"] for run in runs) / sum(run["steps"] for run in runs)
    ratios = [run["step_ms"] / base["step_ms"] for run, base in zip(runs, plain, strict=True)]
    return {
        "batch_size": batch,
        "tree_size": size,
        "step_ms": asdict(Spread.of([run["step_ms"] for run in runs])),
        "ratio": asdict(Spread.of(ratios)),
        "parts_ms": {part: statistics.median(run["parts_ms"][part] for run in runs) for part in PARTS},
        "tokens_per_step": per_step,
        "tokens_per_second": asdict(Spread.of([1000 * batch * per_step / run["step_ms"] for run in runs])),
        "speedup": asdict(Spread.of([per_step / ratio for ratio in ratios])),
        "repeats": list(runs),
    }


def simulation_table(result: dict[str, Any]) -> str:
    """The rows of `simulate` for people."""
    setting = result["setting"]
    lines = [
        f"{setting['shape']}, random weights, {setting['dtype']} on {setting['device']}, {setting['num_heads']} heads; "
        f"acceptance is given ({', '.join(f'{share:g}' for share in setting['accepted_histogram'])}), not measured",
        f"{'batch':>5} {'size':>4}  {'step ms':<24} {'ratio':>6}  {'draft':>7} {'forward':>8} {'verify':>7} "
        f"{'commit':>7}  {'tokens/step':>11} {'tokens/s':>9} {'speedup':>8}",
    ]
    for row in result["rows"]:
        step, parts = row["step_ms"], row["parts_ms"]
        spread = f"{step['median']:.2f} [{step['minimum']:.2f}..{step['maximum']:.2f}]"
        lines.append(
            f"{row['batch_size']:>5} {row['tree_size']:>4}  {spread:<24} {row['ratio']['median']:>6.2f}  "
            f"{parts['draft']:>7.2f} {parts['forward']:>8.2f} {parts['verify']:>7.2f} {parts['commit']:>7.2f}  "
            f"{row['tokens_per_step']:>11.2f} {row['tokens_per_second']['median']:>9.1f} "
            f"{row['speedup']['median']:>8.2f}"
        )
    return "\n".join(lines)
