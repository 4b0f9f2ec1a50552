"""Where a row ends: exactly, whatever blocks its tokens come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.inference import UserError
from medusa_train.inference.stopping import Block, Row, Stopping


class Letters:
    """A tokenizer whose tokens are letters: 0 is a, 1 is b, …; 26 is a special token that is shown in brackets."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(
            "" if token == 26 and skip_special_tokens else "<s>" if token == 26 else chr(97 + token) for token in ids
        )


class Bytes:
    """A byte-level tokenizer: every token is one byte of UTF-8."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=30)
STOPS = st.lists(st.text("abcde", min_size=1, max_size=4), max_size=3)
BLOCKS = st.lists(st.integers(1, 5), min_size=30, max_size=30)


def reference(tokens, budget, room, eos, stops):
    """Token by token, as plain decoding would: what is kept, and why it ends (None while it does not)."""
    kept = []
    for token in tokens:
        kept.append(token)
        if token in eos or any(stop in Letters().decode(kept) for stop in stops):
            return kept, "stop"
        if len(kept) == min(budget, room):
            return kept, "length" if budget <= room else "context"
    return kept, None


@given(
    TOKENS, BLOCKS, st.integers(1, 12), st.none() | st.integers(1, 12), st.sets(st.integers(0, 6), max_size=2), STOPS
)
def test_a_row_ends_where_plain_decoding_would_whatever_the_blocks(tokens, sizes, budget, room, eos, stops):
    prompt = [7, 8, 9]
    limit = None if room is None else len(prompt) + room
    row = Row(prompt, Stopping(budget, tuple(eos), stops, None, Letters()), limit)
    expected, reason = reference(tokens, budget, 10**9 if room is None else room, eos, stops)
    emitted, start = [], 0
    for steps, size in enumerate(sizes):
        offered = tokens[start : start + size]
        start += size
        if not offered:
            break
        over = row.finish_reason is not None
        block = row.take(offered, len(offered) - 1, steps)
        assert list(block.tokens) == offered[: len(block.tokens)]
        assert 0 <= block.drafted <= len(block.tokens)
        # The token that the backbone chose itself is cut first.
        assert block.drafted == min(len(offered) - 1, len(block.tokens))
        assert block.finish_reason == (None if over else row.finish_reason)
        if over:
            assert block == Block((), 0, None)
        else:
            assert len(block.tokens) == len(offered) or row.finish_reason is not None
        emitted += block.tokens
        assert row.new_tokens == emitted
        assert row.text == prompt + emitted
        assert len(row.text) <= (limit or 10**9)
        assert len(emitted) + row.room == min(budget, 10**9 if room is None else room)
    assert emitted == expected
    assert row.finish_reason == reason


@given(st.integers(0, 9), st.integers(1, 4))
def test_passes_are_bounded_unless_the_row_ends_otherwise(bound, size):
    row = Row([1], Stopping(20, (), (), bound), None)
    steps = 0
    while row.finish_reason is None:
        row.take([2] * (size if steps else 1), 0, steps)
        steps += 1
    passes = steps - 1  # the first block is prefill's
    budget_passes = -(-19 // size)
    assert passes == min(bound, budget_passes)
    assert row.finish_reason == ("length" if budget_passes <= bound else "steps")


def test_the_reasons_rank_stop_before_limits_and_limits_before_passes():
    assert Row([1], Stopping(1, (5,), (), 0), 2).take([5], 0, 0).finish_reason == "stop"
    assert Row([1], Stopping(1, (), (), 0), 2).take([5], 0, 0).finish_reason == "length"
    assert Row([1], Stopping(2, (), (), 0), 2).take([5], 0, 0).finish_reason == "context"
    assert Row([1], Stopping(2, (), (), 0), 9).take([5], 0, 0).finish_reason == "steps"


def test_an_end_token_in_the_prompt_ends_nothing():
    row = Row([5, 0, 1, 5], Stopping(3, (5,), ("ab",), None, Letters()), None)
    assert row.take([2], 0, 0).finish_reason is None


def test_a_stop_string_that_the_prompt_began_does_not_count():
    row = Row([0], Stopping(3, (), ("ab",), None, Letters()), None)
    assert row.take([1], 0, 0).finish_reason is None


@pytest.mark.parametrize("stop", ["é", "日本", "x€", "€x", "👩‍👧"])
def test_a_stop_string_may_hold_letters_of_several_tokens(stop):
    text = ("日é" * 20 + "..").replace("é", "è") + stop + "é€日x"
    tokens = list(text.encode())
    expected = list(text[: text.index(stop) + len(stop)].encode())
    for size in (1, 3, 7, len(tokens)):
        row = Row([1], Stopping(500, (), (stop,), None, Bytes()), None)
        for start in range(0, len(tokens), size):
            row.take(tokens[start : start + size], 0, 0)
        assert row.new_tokens == expected
        assert row.finish_reason == "stop"


def test_a_long_stop_string_and_one_with_a_special_token_are_seen_whole():
    stop = "abcde" * 30
    row = Row([1], Stopping(999, (), (stop,), None, Letters()), None)
    row.take([4, 4, *[0, 1, 2, 3, 4] * 31], 0, 0)
    assert len(row.new_tokens) == 152
    row = Row([1], Stopping(99, (), ("b<s>",), None, Letters()), None)
    assert row.take([0, 1, 26, 3], 0, 0).tokens == (0, 1, 26)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="empty string"):
        Stopping(5, (), ("a", ""), None, Letters())
    with pytest.raises(UserError, match="needs the tokenizer"):
        Stopping(5, (), ("a",))
    with pytest.raises(UserError, match="no token"):
        Row([], Stopping(5), None)
    for length in (4, 5):
        with pytest.raises(UserError, match=f"has {length} tokens, the backbone reads at most 3"):
            Row([1] * length, Stopping(5), 4)
    assert Row([1] * 3, Stopping(5), 4).room == 1
