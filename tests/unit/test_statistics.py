"""Rows, counted: against plain counting."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.data.dataset import draft_vocabulary
from medusa_train.data.rows import Row
from medusa_train.data.statistics import learnt_ids, percentiles, pieces_of, summarize

token_lists = st.lists(st.integers(0, 700), min_size=1, max_size=12)
splits = st.sampled_from(["train", "calibration", "heldout"])


def make_row(number, split, prompt, answers, reason="stop"):
    """A row of answers with a token that is not learnt behind each."""
    ids, spans = list(prompt), []
    for answer in answers:
        spans.append((len(ids), len(ids) + len(answer)))
        ids += [*answer, 3]
    return Row(f"{number:016x}", split, [], ids, spans, reason)


rows_of = st.lists(st.tuples(splits, token_lists, st.lists(token_lists, min_size=1, max_size=3)), min_size=1).map(
    lambda made: [make_row(i, *row) for i, row in enumerate(made)]
)


@settings(derandomize=True, deadline=None)
@given(rows=rows_of)
def test_every_figure_is_that_of_plain_counting(rows):
    summary = summarize(iter(rows), examples=2)
    answers = [learnt_ids(row) for row in rows]
    assert summary.total_rows == len(rows)
    assert summary.total_learnt == sum(map(len, answers))
    assert summary.spans == sum(len(row.spans) for row in rows)
    assert list(summary.answer_lengths) == [len(answer) for answer in answers]
    assert list(summary.row_lengths) == [len(row.input_ids) for row in rows]
    assert summary.repeated_answers == len(rows) - len(set(answers))
    assert summary.repeated_rows == len(rows) - len({tuple(row.input_ids) for row in rows})
    assert summary.example == rows[:2]
    for split in ("train", "calibration", "heldout"):
        members = [answer for row, answer in zip(rows, answers, strict=True) if row.split == split]
        counted = Counter(token for answer in members for token in answer)
        assert summary.rows[split] == len(members)
        assert {i: int(count) for i, count in enumerate(summary.token_counts[split]) if count} == counted


@settings(derandomize=True, deadline=None)
@given(rows=rows_of)
def test_a_vocabulary_covers_what_that_of_the_train_stage_does(rows):
    train = [torch.tensor(learnt_ids(row)) for row in rows if row.split == "train"]
    others = [token for row in rows if row.split != "train" for token in learnt_ids(row)]
    coverage = summarize(rows).coverage()
    assert bool(coverage) == bool(train)
    for size, share, unseen in coverage:
        kept, covered = draft_vocabulary(train, size, vocab_size=4096)
        assert share == pytest.approx(covered)
        if others:
            assert unseen == pytest.approx(sum(token in kept.tolist() for token in others) / len(others))
        else:
            assert unseen is None
    if coverage:
        assert coverage[-1][1] == 1


def test_percentiles_are_lengths_that_occur():
    assert percentiles(range(101)) == {0: 0, 10: 10, 50: 50, 90: 90, 100: 100}
    assert percentiles([7]) == {0: 7, 10: 7, 50: 7, 90: 7, 100: 7}


class Letters:
    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(chr(97 + token) for token in ids)


def test_a_row_is_cut_where_learning_begins_and_ends():
    row = make_row(0, "train", [0, 1], [[4, 5], [6]])
    assert pieces_of(row, Letters()) == [("ab", False), ("ef", True), ("d", False), ("g", True), ("d", False)]
