"""What a run needs and what looks wrong with it: pure functions of sizes and rows, for `doctor`.

Nothing here loads, measures or writes; every figure is exact unless its name says ``estimate``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medusa_train.data.hidden_states import CacheDtype, position_bytes
from medusa_train.data.rows import SPLITS, Row, Split
from medusa_train.data.statistics import LOOP_SHARE, learnt_ids, repeated_share
from medusa_train.inference.checkpoint import expected_shapes
from medusa_train.inference.heads_config import HeadsConfig

FP32 = 4  # bytes; heads train in fp32, also under bf16 autocast
LOSS_CHUNK = 1024  # positions of a head whose logits exist at once; see `losses.medusa_loss`
LOGIT_COPIES = 4  # logits, their log-softmax, the soft labels, a gradient
KEPT_CHECKPOINTS = 3  # two that stay and the one being written

MIN_COVERAGE = 0.95  # the head vocabulary that this project measured as hardly worse covers 96 %
MAX_CUT_SHARE = 0.5
MAX_SHORT_SHARE = 0.1
MAX_LOOPING_SHARE = 0.1
MAX_DUPLICATE_SHARE = 0.02
MIN_SPLIT_ROWS = 20
MIN_SPLIT_POSITIONS = 2000  # a share of 0.3 is then known to about 0.02 (95 %)


@dataclass(frozen=True)
class Finding:
    """Something to tell: an ``error`` stops a stage, a ``warning`` costs quality or time, a ``note`` is harmless."""

    level: Literal["error", "warning", "note"]
    message: str


def count_parameters(config: HeadsConfig) -> int:
    """Trained numbers in all heads; the list of draft tokens is not trained."""
    return sum(math.prod(shape) for name, shape in expected_shapes(config).items() if name != "draft_token_ids")


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that training holds beside the backbone.

    Attributes:
        weights: fp32 heads.
        gradients: as many.
        optimizer: the two moments of Adam, fp32.
        projections: frozen rows of the backbone's, for soft labels and for heads that share them.
        logits_estimate: logits and what the loss makes of them.
    """

    weights: int
    gradients: int
    optimizer: int
    projections: int
    logits_estimate: int

    @property
    def total_estimate(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.projections + self.logits_estimate


def training_memory(config: HeadsConfig, batch_positions: int) -> TrainingMemory:
    """Memory of training with batches of so many positions."""
    weights = FP32 * count_parameters(config)
    columns = config.projection_size
    # A batch that is one chunk keeps the logits of every head until the backward pass, larger ones remake them.
    alive = batch_positions * config.num_heads if batch_positions <= LOSS_CHUNK else LOSS_CHUNK
    return TrainingMemory(
        weights=weights,
        gradients=weights,
        optimizer=2 * weights,
        projections=(2 if config.lm_head == "shared" else 1) * FP32 * columns * config.hidden_size,
        logits_estimate=LOGIT_COPIES * FP32 * alive * columns,
    )


def cache_bytes(positions: int, hidden_size: int, dtype: CacheDtype = "bfloat16") -> int:
    """Hidden-state cache on disk."""
    return positions * position_bytes(hidden_size, dtype)


def checkpoint_bytes(config: HeadsConfig) -> int:
    """What the train stage writes: checkpoints with optimizer state, and the finished heads."""
    weights = FP32 * count_parameters(config)
    return KEPT_CHECKPOINTS * 3 * weights + weights


def optimizer_steps(positions: int, batch: int, accumulation: int, epochs: float) -> int:
    """Optimizer steps of a run in one process, counted as `transformers.Trainer` does."""
    per_epoch = max(1, math.ceil(math.ceil(positions / batch) / accumulation))
    return math.ceil(epochs * per_epoch)


@dataclass(frozen=True)
class RowStatistics:
    """Rows, counted.

    Attributes:
        rows: per split.
        positions: per split, the tokens that carry loss, which is what the cache keeps.
        targets: training targets of head 1..K.
        spans, short_spans: of training rows; short ones are shorter than the last head reaches.
        distinct_tokens: different tokens among the training answers.
        coverage: share of training answer tokens in the head vocabulary made of them.
        unseen_coverage: the same share of calibration and held-out answer tokens; None without any.
        with_end: rows with an end token among their targets.
        cut: rows whose answer was cut by length.
        looping: rows with at least `LOOP_SHARE` repeated 4-grams.
        duplicates: rows whose answer another row before has word by word.
        wholly_learnt: rows without a token that is not a target.
    """

    rows: dict[Split, int]
    positions: dict[Split, int]
    targets: list[int]
    spans: int
    short_spans: int
    distinct_tokens: int
    coverage: float
    unseen_coverage: float | None
    with_end: int
    cut: int
    looping: int
    duplicates: int
    wholly_learnt: int

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())

    @property
    def training_positions(self) -> int:
        """Samples of the train stage: positions with a target for head 1."""
        return self.targets[0]


def survey(rows: Sequence[Row], config: HeadsConfig, end_ids: Collection[int]) -> RowStatistics:
    """Count what training will see of ``rows``."""
    answers = [learnt_ids(row) for row in rows]
    train = [row for row in rows if row.split == "train"]
    spans = [end - max(start, 1) for row in train for start, end in row.spans]  # nothing predicts a text's first token
    counts = torch.bincount(_answer_tokens(train), minlength=config.vocab_size)
    kept = counts.argsort(descending=True, stable=True)[: config.projection_size]  # as the train stage chooses them
    unseen = _answer_tokens(row for row in rows if row.split != "train")
    seen_before, duplicates = set(), 0
    for answer in answers:
        duplicates += answer in seen_before
        seen_before.add(answer)
    return RowStatistics(
        rows={split: sum(row.split == split for row in rows) for split in SPLITS},
        positions={
            split: sum(end - max(start, 1) for row in rows if row.split == split for start, end in row.spans)
            for split in SPLITS
        },
        targets=[sum(max(0, length - head) for length in spans) for head in range(1, config.num_heads + 1)],
        spans=len(spans),
        short_spans=sum(length <= config.num_heads for length in spans),
        distinct_tokens=int((counts > 0).sum()),
        coverage=float(counts[kept].sum() / counts.sum()) if train else 0.0,
        unseen_coverage=float(torch.isin(unseen, kept).float().mean()) if len(unseen) else None,
        with_end=sum(not set(end_ids).isdisjoint(answer) for answer in answers),
        cut=sum(row.finish_reason == "length" for row in rows),
        looping=sum(repeated_share(answer) >= LOOP_SHARE for answer in answers),
        duplicates=duplicates,
        wholly_learnt=sum(row.learnt_tokens == len(row.input_ids) for row in rows),
    )


def judge(stats: RowStatistics, config: HeadsConfig, eval_prompts: int) -> list[Finding]:
    """What looks wrong with the rows for heads of this shape, the gravest first."""
    found: list[Finding] = []

    def tell(level: Literal["error", "warning", "note"], message: str) -> None:
        found.append(Finding(level, message))

    total, reach = stats.total_rows, config.num_heads
    for split in SPLITS:
        if not stats.rows[split]:
            advice = "lower the other shares" if split == "train" else f"raise data.{split}_share"
            tell("error", f"no row in the {split} split; give more prompts or {advice}")
    if stats.rows["train"] and not stats.targets[-1]:
        tell("error", f"no answer is long enough for head {reach}; lower heads.num_heads or give longer answers")
    elif stats.short_spans > MAX_SHORT_SHARE * stats.spans:
        tell(
            "warning",
            f"{_share(stats.short_spans, stats.spans)} of the answers are no longer than the {reach} tokens that heads "
            f"reach: head {reach} has {stats.targets[-1]:,} targets, head 1 {stats.targets[0]:,}",
        )
    if not stats.with_end:
        why = "every answer was cut" if stats.cut == total else "the text or the chat template lacks it"
        tell("warning", f"no end token is ever a target ({why}), so heads never learn where answers end")
    if stats.cut > MAX_CUT_SHARE * total:
        tell(
            "warning",
            f"{_share(stats.cut, total)} of the answers are cut by length, so heads rarely see an ending; "
            "raise data.max_new_tokens, or data.max_length for given conversations",
        )
    if stats.wholly_learnt:
        tell("warning", f"{stats.wholly_learnt} rows are learnt whole, prompt included; see the row above")
    needed = config.hidden_size**2
    if 0 < stats.training_positions < needed:
        tell(
            "warning",
            f"{stats.training_positions:,} training positions are few for this head size: a residual block starts from "
            f"nothing with {config.hidden_size}^2 = {needed:,} weights (projections start as the backbone's), and "
            "acceptance kept rising up to about one position per weight when measured; give more prompts",
        )
    if config.draft_vocab_size and stats.rows["train"]:
        seen = min(stats.coverage, stats.unseen_coverage if stats.unseen_coverage is not None else 1.0)
        room = config.draft_vocab_size - stats.distinct_tokens
        if seen < MIN_COVERAGE:
            remedy = "give more prompts" if room > 0 else "raise heads.draft_vocab_size"
            tell(
                "warning",
                f"the head vocabulary of {config.draft_vocab_size:,} tokens misses {1 - seen:.1%} of answer tokens, "
                f"and no draft gets past one of those; {remedy}, or use 0 for the whole vocabulary",
            )
        if room > 0:
            tell(
                "note",
                f"training answers use {stats.distinct_tokens:,} different tokens; the other {room:,} of the head "
                "vocabulary are filled up with the lowest ids and are never a target",
            )
    for split, purpose in (("calibration", "choose a tree"), ("heldout", "measure")):
        rows, positions = stats.rows[split], stats.positions[split]
        if rows and (rows < MIN_SPLIT_ROWS or positions < MIN_SPLIT_POSITIONS):
            tell(
                "warning",
                f"the {split} split has {rows} rows with {positions:,} positions, little to {purpose} with (wanted: "
                f"{MIN_SPLIT_ROWS} rows and {MIN_SPLIT_POSITIONS:,} positions, for shares within about 0.02); "
                f"raise data.{split}_share or give more prompts",
            )
    if 0 < stats.rows["heldout"] < eval_prompts:
        tell("warning", f"eval.num_prompts={eval_prompts}, but only {stats.rows['heldout']} rows are held out")
    if stats.looping > MAX_LOOPING_SHARE * total:
        tell(
            "warning",
            f"{_share(stats.looping, total)} of the answers loop (at least {LOOP_SHARE:.0%} of their 4-grams repeat): "
            "loops are easy to draft, which flatters every acceptance figure; shorten answers or leave these out",
        )
    if stats.duplicates > MAX_DUPLICATE_SHARE * total:
        tell(
            "warning",
            f"{_share(stats.duplicates, total)} of the answers equal another one; they add no data, and may stand on "
            "both sides of the split",
        )
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / max(1, whole):.0%})"


def _answer_tokens(rows: Iterable[Row]) -> Tensor:
    return torch.tensor([token for row in rows for token in learnt_ids(row)], dtype=torch.long)
