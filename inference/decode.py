"""The decode loop: draft, one backbone pass, verify, commit.

One loop serves every drafter and verifier and any number of rows; plain decoding is the same loop with a drafter that
proposes nothing, so that the baseline of a speedup runs the same code. The state between steps is small: the committed
cache, each row's root token (already emitted, not yet in the cache) and the hidden state that it was chosen from.

A row that ends leaves the batch at once: the last one moves into its place, which copies one row's keys and values and
so costs about what that row's share of one pass costs. Waiting rows do not take free places (continuous batching): a
pass costs by its rows, so no row's share would be saved, only some reading of weights in passes with few rows. Compiled
steps keep ended rows, since every number of rows would be a graph of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from medusa_train.inference.attention import read_prompts
from medusa_train.inference.drafters import Context, Drafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.sampling import Chances, LogitsProcessor, apply_processors
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.step import Step
from medusa_train.inference.stopping import Block, Row, Stopping
from medusa_train.inference.tree import Tree
from medusa_train.inference.verify import Draft, Generators, NanLogitsError, Process, Verdict

# (logits (B, N, V), draft, rows still generating, process, chances per row) -> a verdict for each of these rows
Verify = Callable[[Tensor, Draft, Sequence[int], Process | None, Sequence[Chances]], list[Verdict]]
# (number of a row, (m, hidden) last hidden states that the m tokens it just emitted were chosen from)
StateSink = Callable[[int, Tensor], None]


@torch.inference_mode()  # torch wraps a generator step by step, so the mode does not leak to the caller
def decode(
    step: Step,
    drafter: Drafter,
    verify: Verify,
    prompts: Sequence[Tensor],
    stopping: Stopping,
    stats: DecodeStats,
    processors: Sequence[LogitsProcessor] = (),
    generators: Generators | None = None,
    states: StateSink | None = None,
) -> Iterator[list[Block]]:
    """Generate after each prompt, a block per row at a time; ends when every row has ended.

    Args:
        step: makes the backbone's passes.
        prompts: ``(T_b,)`` token ids of each row, T_b >= 1.
        stats: filled as blocks are emitted.
        processors: change a row's logits given its text, at every node that is visited.
        generators: one per row, for verifiers and drafters that draw.
        states: called for each row that emits, before its block is yielded.

    Raises:
        UserError: a prompt is empty or already fills the model's context, or logits are NaN (the step is named).
    """
    backbone = step.backbone
    rows = [Row(prompt.tolist(), stopping, backbone.max_positions) for prompt in prompts]
    numbers = list(range(len(rows)))  # which prompt's row stands where
    if stopping.max_new_tokens < 1:
        return
    generators = [None] * len(rows) if generators is None else generators
    room = max(row.prompt_length + row.room for row in rows)
    cache = step.new_cache(drafter.max_size, room)
    chances = [Chances(generator, backbone.device) for generator in generators]

    def checked(logits: Tensor, draft: Draft, active: Sequence[int], number: int) -> list[Verdict]:
        process = partial(_process, rows, processors) if processors else None
        try:
            return verify(logits, draft, active, process, chances)
        except NanLogitsError as error:
            where = f"step {number}" if number else "the prompt"
            raise UserError(f"{error} at {where}; check the backbone's dtype and weights") from error

    clock = time.perf_counter()
    hidden = read_prompts(backbone, [prompt.to(backbone.device) for prompt in prompts], cache)
    # Prefill verifies a tree without a root: its verdicts are the first tokens.
    roots = torch.zeros(len(rows), 1, dtype=torch.long, device=backbone.device)
    first = Draft([Tree.root_only()] * len(rows), roots)
    active = numbers
    verdicts = checked(backbone.logits(hidden)[:, None], first, active, 0)
    blocks = [rows[row].take(verdict.tokens, 0, 0) for row, verdict in zip(active, verdicts, strict=True)]
    if states is not None:
        for row in active:
            states(row, hidden[row : row + 1])
    draft_next = drafter.start(prompts, max(row.room for row in rows) + 1, generators)
    stats.prefill_tokens += len(rows)
    stats.prefill_seconds += time.perf_counter() - clock
    yield blocks
    accepted, passes = [0] * len(rows), 0
    while active := [place for place, row in enumerate(rows) if row.finish_reason is None]:
        marks = [time.perf_counter()]
        if len(active) < len(rows) and not step.compiled:
            places = _close_gaps(active)
            cache.keep(places)
            rows, numbers = [rows[place] for place in places], [numbers[place] for place in places]
            chances, accepted = [chances[place] for place in places], [accepted[place] for place in places]
            hidden, active = hidden[places], list(range(len(rows)))
        texts = [row.text for row in rows]
        roots = torch.tensor([text[-1] for text in texts], device=backbone.device)
        draft = draft_next(Context(texts, hidden, roots, active, accepted, numbers))
        marks.append(time.perf_counter())
        node_hidden, logits = step(draft.tokens.to(backbone.device), draft.trees, cache)
        marks.append(time.perf_counter())
        passes += 1
        verdicts = checked(logits, draft, active, passes)
        marks.append(time.perf_counter())
        stats.passes += 1
        stats.last_pass_size = draft.tokens.shape[1]
        stats.pass_sizes[stats.last_pass_size] += 1
        paths: list[tuple[int, ...]] = [()] * len(rows)
        last = [0] * len(rows)
        blocks = [Block((), 0, None)] * len(prompts)
        for row, verdict in zip(active, verdicts, strict=True):
            accepted[row], last[row] = len(verdict.path) - 1, verdict.path[-1]
            block = blocks[numbers[row]] = rows[row].take(verdict.tokens, accepted[row], passes)
            if states is not None:
                states(numbers[row], node_hidden[row, list(verdict.path[: len(block.tokens)])])
            stats.histogram[len(block.tokens)] += 1
            if rows[row].finish_reason is None:
                paths[row] = verdict.path
        cache.commit(paths, stats.last_pass_size)
        hidden = node_hidden[torch.arange(len(rows)), torch.tensor(last)]
        marks.append(time.perf_counter())
        for name, start, end in zip(("draft", "forward", "verify", "commit"), marks, marks[1:], strict=False):
            setattr(stats, f"{name}_seconds", getattr(stats, f"{name}_seconds") + end - start)
        yield blocks


def _close_gaps(active: Sequence[int]) -> list[int]:
    """The active rows in an order that leaves as many as possible in their places: [0, 2, 5] -> [0, 5, 2]."""
    spare = iter([row for row in active if row >= len(active)])
    staying = set(active)
    return [place if place in staying else next(spare) for place in range(len(active))]


def _process(
    rows: Sequence[Row], processors: Sequence[LogitsProcessor], row: int, drafted: list[int], logits: Tensor
) -> Tensor:
    if rows[row].ends_with(drafted):  # plain decoding never gets here, and what is chosen here is cut off
        return logits
    return apply_processors(processors, rows[row].text + drafted, logits)
