"""What is in rows, counted in one pass, and a row in pieces for people to read."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from medusa_train.data.rows import SPLITS, Row, Split

LOOP_NGRAM = 4
LOOP_SHARE = 0.3  # repeated 4-grams in one answer; ordinary text of a few hundred tokens stays below 0.1
PERCENTILES = (0, 10, 50, 90, 100)
SMALLEST_VOCABULARY = 256


@dataclass
class RowsSummary:
    """Rows, counted. Lengths are in tokens; a row's answer is all that it learns.

    Attributes:
        rows: per split.
        learnt: per split, the tokens that carry loss.
        finish_reasons: how answers ended.
        row_lengths, answer_lengths: one entry per row.
        spans: answers, of which a conversation has several.
        token_counts: per split ``(vocabulary,)``, how often each token is learnt.
        repeated_rows: rows whose ids another one before has.
        repeated_answers: rows whose answer another one before has.
        looping: rows with at least `LOOP_SHARE` repeated 4-grams in their answer.
        example: the first rows.
    """

    rows: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    learnt: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    finish_reasons: Counter[str] = field(default_factory=Counter)
    row_lengths: array[int] = field(default_factory=lambda: array("q"))
    answer_lengths: array[int] = field(default_factory=lambda: array("q"))
    spans: int = 0
    token_counts: dict[Split, NDArray[np.int64]] = field(
        default_factory=lambda: {split: np.zeros(SMALLEST_VOCABULARY, np.int64) for split in SPLITS}
    )
    repeated_rows: int = 0
    repeated_answers: int = 0
    looping: int = 0
    example: list[Row] = field(default_factory=list)

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())

    @property
    def total_learnt(self) -> int:
        return sum(self.learnt.values())

    @property
    def distinct_tokens(self) -> int:
        """Different tokens among the training answers."""
        return int((self.token_counts["train"] > 0).sum())

    def coverage(self) -> list[tuple[int, float, float | None]]:
        """Draft vocabulary sizes, and the share of answer tokens in a vocabulary made of the training answers.

        Of training answers, and of all others (None without any). Sizes double, up to all tokens that are used.
        """
        width = max(len(counts) for counts in self.token_counts.values())
        train, *others = (np.pad(counts, (0, width - len(counts))) for counts in self.token_counts.values())
        rest = np.sum(others, axis=0)
        by_count = np.argsort(-train, kind="stable")  # as the train stage chooses them
        covered, unseen = train[by_count].cumsum(), rest[by_count].cumsum()
        if not covered[-1]:
            return []
        sizes = [SMALLEST_VOCABULARY]
        while sizes[-1] < self.distinct_tokens:
            sizes.append(2 * sizes[-1])
        return [
            (size, float(covered[place] / covered[-1]), float(unseen[place] / rest.sum()) if rest.sum() else None)
            for size in sizes
            for place in (min(size, width) - 1,)
        ]


def summarize(rows: Iterable[Row], examples: int = 0) -> RowsSummary:
    """Count rows in one pass; a few dozen bytes of each stay in memory."""
    summary = RowsSummary()
    known_rows: set[bytes] = set()
    known_answers: set[bytes] = set()
    for row in rows:
        answer = learnt_ids(row)
        summary.rows[row.split] += 1
        summary.learnt[row.split] += len(answer)
        summary.finish_reasons[row.finish_reason] += 1
        summary.row_lengths.append(len(row.input_ids))
        summary.answer_lengths.append(len(answer))
        summary.spans += len(row.spans)
        counts = np.bincount(np.array(answer, np.int64))
        total = summary.token_counts[row.split]
        if len(counts) > len(total):
            summary.token_counts[row.split] = total = np.pad(total, (0, 2 * len(counts) - len(total)))
        total[: len(counts)] += counts
        summary.repeated_rows += _is_known(row.input_ids, known_rows)
        summary.repeated_answers += _is_known(answer, known_answers)
        summary.looping += repeated_share(answer) >= LOOP_SHARE
        if len(summary.example) < examples:
            summary.example.append(row)
    return summary


def _is_known(ids: Sequence[int], known: set[bytes]) -> bool:
    key = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=12).digest()
    if key in known:
        return True
    known.add(key)
    return False


def percentiles(lengths: Sequence[int]) -> dict[int, int]:
    """`PERCENTILES` of lengths."""
    values = np.percentile(np.array(lengths), PERCENTILES, method="nearest")
    return {percent: int(value) for percent, value in zip(PERCENTILES, values, strict=True)}


def learnt_ids(row: Row) -> tuple[int, ...]:
    """The ids of a row that carry loss."""
    return tuple(token for start, end in row.spans for token in row.input_ids[start:end])


def repeated_share(ids: Sequence[int], size: int = LOOP_NGRAM) -> float:
    """Share of n-grams that stood before in the same text: 0 without repetition, near 1 in a loop."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def pieces_of(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """A row as ``(text, learnt)``: prompt and template apart from what is learnt."""
    edges = sorted({0, len(row.input_ids), *(edge for span in row.spans for edge in span)})
    learnt = {start for start, _ in row.spans}
    return [
        (tokenizer.decode(row.input_ids[start:end], skip_special_tokens=False), start in learnt)
        for start, end in pairwise(edges)
    ]
