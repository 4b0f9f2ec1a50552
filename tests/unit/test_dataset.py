"""Training samples from the cache, against a slow reference that walks every span."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from conftest import no_copies
from medusa_train.data.dataset import IGNORED, HeadsDataset, draft_vocabulary
from medusa_train.data.hidden_states import Shard
from medusa_train.inference.heads_config import MOST_COPIED

# Span lengths, per shard.
layouts = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4)
fixed = settings(derandomize=True, deadline=None)


def make_shards(layout):
    """Shards in which every state and every token is a number of its own."""
    shards, first = [], 0
    for lengths in layout:
        size = sum(lengths)
        number = torch.arange(first, first + size)
        ends = torch.cat([torch.full((length,), sum(lengths[: i + 1])) for i, length in enumerate(lengths)])
        copies = number[:, None] * 10 + torch.arange(MOST_COPIED)
        hidden = torch.stack([number, -number], dim=1).to(torch.bfloat16)
        shards.append(Shard(hidden, 1000 + number, ends, copies.int()))
        first += size
    return shards


def reference_samples(layout, num_heads):
    """In order: the number of the input state, the label of every head, the number of every teacher state."""
    samples, first = [], 0
    for length in (length for lengths in layout for length in lengths):
        span = range(first, first + length)
        for position in span:
            ahead = [position + k if position + k in span else None for k in range(1, num_heads + 1)]
            if ahead[0] is not None:
                samples.append((position, [IGNORED if p is None else 1000 + p for p in ahead], ahead))
        first += length
    return samples


def assert_is(sample, expected):
    position, labels, ahead = expected
    assert sample["hidden"].tolist() == [position, -position]
    assert sample["labels"].tolist() == labels
    assert sample["copies"].tolist() == [position * 10 + place for place in range(MOST_COPIED)]
    for state, place in zip(sample["teacher_hidden"].tolist(), ahead, strict=True):
        assert place is None or state == [place, -place]


@fixed
@given(layouts, st.integers(1, 5))
def test_labels_and_teachers_are_shifts_that_never_leave_their_span(layout, num_heads):
    dataset, expected = HeadsDataset(make_shards(layout), num_heads), reference_samples(layout, num_heads)
    assert len(dataset) == len(expected)
    for index, sample in enumerate(expected):
        assert_is(dataset[index], sample)


@fixed
@given(layouts, st.integers(1, 5), st.randoms())
def test_a_batch_in_any_order_is_its_samples(layout, num_heads, random):
    dataset, expected = HeadsDataset(make_shards(layout), num_heads), reference_samples(layout, num_heads)
    order = list(range(len(expected))) * 2
    random.shuffle(order)
    if not order:
        return
    batch = dataset.__getitems__(order)
    assert batch["hidden"].shape == (len(order), 2)
    assert batch["teacher_hidden"].shape == (len(order), num_heads, 2)
    for place, index in enumerate(order):
        assert_is({name: tensor[place] for name, tensor in batch.items()}, expected[index])


def test_a_loader_gets_whole_batches():
    dataset = HeadsDataset(make_shards([[4, 3], [1], [5]]), 2)
    loader = DataLoader(dataset, batch_size=4, collate_fn=lambda batch: batch)
    hidden = torch.cat([batch["hidden"] for batch in loader])
    assert hidden[:, 0].tolist() == [0, 1, 2, 4, 5, 8, 9, 10, 11]


@fixed
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=3), st.integers(1, 10))
def test_the_draft_vocabulary_is_the_most_frequent_tokens_in_rising_order(token_lists, size):
    shards = [
        Shard(torch.zeros(len(ids), 2), torch.tensor(ids), torch.full((len(ids),), len(ids)), no_copies(len(ids)))
        for ids in token_lists
    ]
    counts = Counter(token for ids in token_lists for token in ids)
    expected = sorted(sorted(range(10), key=lambda token: (-counts[token], token))[:size])
    kept, coverage = draft_vocabulary((shard.tokens for shard in shards), size, vocab_size=10)
    assert kept.tolist() == expected
    assert coverage == pytest.approx(sum(counts[token] for token in expected) / counts.total())
