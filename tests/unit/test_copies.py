"""What followed the same words: against a brute-force search; loops go on as loops; a copy counts until it is left."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.inference.copies import (
    HEADS_NGRAMS,
    MOST_COPIED,
    NO_COPY,
    CopyFinder,
    CopyRecord,
    NgramIndex,
    agreeing,
    copied_ids,
    copies_in,
)

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
SIZES = st.integers(1, 4).flatmap(lambda low: st.tuples(st.integers(low, 5), st.just(low)))


def brute_force(text, max_ngram, min_ngram, count):
    """Copy, token by token, from behind the latest earlier occurrence of the longest n-gram that occurs earlier."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                copied = list(text)
                for place in range(start + size, start + size + count):
                    copied.append(copied[place])
                return copied[len(text) :]
    return None


def indexed(text, max_ngram, min_ngram):
    index = NgramIndex(max_ngram, min_ngram)
    index.extend(text)
    return index


@given(TEXTS, SIZES, st.integers(1, 9))
def test_a_continuation_is_what_a_search_through_the_text_finds(text, sizes, count):
    assert indexed(text, *sizes).continuation(count) == brute_force(text, *sizes, count)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=9), SIZES, st.integers(1, 9))
def test_an_index_that_grows_with_the_text_equals_a_fresh_one(pieces, sizes, count):
    index, text = NgramIndex(*sizes), []
    for piece in pieces:
        text += piece
        index.extend(piece)
        assert index.continuation(count) == brute_force(text, *sizes, count)
        assert index.continuation(count) == brute_force(text, *sizes, count)  # asking changes nothing


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), st.integers(0, 4), st.integers(1, 20))
def test_a_loop_is_continued_as_a_loop(loop, extra, count):
    endless = loop * 40
    text = endless[: 2 * len(loop) + 1 + extra]
    assert indexed(text, 3, 1).continuation(count) == endless[len(text) : len(text) + count]


def test_the_longest_and_then_the_latest_occurrence_wins():
    assert indexed([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 3, 1).continuation(1) == [7]
    assert indexed([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 2, 1).continuation(1) == [8]
    assert indexed([4, 1, 5, 2, 5], 3, 2).continuation(3) is None  # only a single token repeats
    assert indexed([4, 1, 5, 2, 5], 3, 1).continuation(3) == [2, 5, 2]


@given(TEXTS, st.integers(0, 40), st.integers(0, 40))
def test_training_reads_the_copies_that_decoding_finds(text, one, other):
    """`copies_in` over a span of a whole text, and a finder that is asked as the text grows."""
    start, end = sorted((one % (len(text) + 1), other % (len(text) + 1)))
    find, none = CopyFinder(3, MOST_COPIED, *HEADS_NGRAMS), [NO_COPY] * MOST_COPIED
    found = [find([text[: place + 1]], [2], [0])[0] or none for place in range(start, end)]
    assert found == [brute_force(text[: place + 1], *HEADS_NGRAMS, MOST_COPIED) or none for place in range(start, end)]
    copies = copies_in(text, start, end)
    assert copies.tolist() == found
    assert copies.shape == (end - start, MOST_COPIED)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=5, max_size=5), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 5),
    st.data(),
)
def test_a_copy_counts_until_the_path_leaves_it(rows, depth, data):
    copies = torch.tensor([copy if there else [NO_COPY] * 5 for copy, there in rows], dtype=torch.int32)
    paths = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=depth, max_size=depth), min_size=len(rows),
                               max_size=len(rows)))  # fmt: skip
    expected = []
    for (copy, there), path in zip(rows, paths, strict=True):
        same = [there and path[1 : 1 + at] == copy[:at] for at in range(depth)]
        expected.append([copy[at] if same[at] else NO_COPY for at in range(depth)])
    assert agreeing(copies, torch.tensor(paths)).tolist() == expected


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, 1), max_size=5))))
def test_a_record_is_the_share_of_copied_tokens_that_came(turns):
    """Against counting: a copy is compared up to its first wrong token, as far as the text went on."""
    record, text, seen = CopyRecord(), [7], []
    assert record.rate(text, None) == 0.5
    for copy, came in turns:
        record.rate(text, copy or None)
        text += came
        for wanted, token in zip(copy, came, strict=False):
            seen.append(wanted == token)
            if wanted != token:
                break
        assert record.rate(text, None) == (1 + sum(seen)) / (2 + len(seen))


def test_copies_as_ids():
    device = torch.device("cpu")
    assert copied_ids([None, None], 2, device) is None
    assert copied_ids([None, [3, 4]], 2, device).tolist() == [[NO_COPY, NO_COPY], [3, 4]]
