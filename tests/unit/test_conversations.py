"""Conversations that are cut: with a template's own marks as with prefixes of its rendering."""

from __future__ import annotations

import pytest
from test_chat_templates import FIRST, SECOND, SYSTEM, WAYS_TO_MARK, make_tokenizer, marked_as

from medusa_train.data.chat import encode_conversation, has_marks
from medusa_train.data.conversations import conversation_row
from medusa_train.inference import UserError

SHARES = {"calibration_share": 0.1, "heldout_share": 0.1}
CONVERSATIONS = {
    "two turns": FIRST + SECOND,
    "a system prompt": [SYSTEM, *FIRST],
    "assistant first": FIRST[1:] + SECOND,
    "space around": [FIRST[0], {"role": "assistant", "content": "  It is\n\n  a cat.\n"}, *SECOND],
}


def row_of(tokenizer, messages, max_length):
    try:
        return conversation_row(tokenizer, messages, max_length, **SHARES)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("way", WAYS_TO_MARK)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_cut_gives_the_same_row_with_marks_as_by_prefixes(way, name):
    plain, marked, messages = make_tokenizer("chatml"), marked_as(way), CONVERSATIONS[name]
    assert has_marks(marked)
    assert not has_marks(plain)
    length = len(encode_conversation(plain, messages)[0])
    for max_length in range(1, length + 2):
        assert row_of(marked, messages, max_length) == row_of(plain, messages, max_length)


@pytest.mark.parametrize("way", [None, *WAYS_TO_MARK])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_cut_keeps_ids_and_labels_in_front_of_it_and_makes_no_ending(way, name):
    tokenizer = marked_as(way) if way else make_tokenizer("chatml")
    messages = CONVERSATIONS[name]
    ids, spans = encode_conversation(tokenizer, messages)
    learnt = [any(start <= place < end for start, end in spans) for place in range(len(ids))]
    endings = {end for _, end in spans}
    for max_length in range(1, len(ids) + 2):
        row = row_of(tokenizer, messages, max_length)
        if max_length <= spans[0][0]:
            assert row == "no assistant token before data.max_length"
            continue
        assert row.input_ids == ids[:max_length]
        places = range(len(row.input_ids))
        assert [any(start <= place < end for start, end in row.spans) for place in places] == learnt[:max_length]
        inside = any(start < max_length < end for start, end in spans)
        assert row.finish_reason == ("length" if inside else "given")
        # A label is the end token where an answer really ends, and nowhere else.
        labelled = [ids[end - 1] == tokenizer.eos_token_id for _, end in row.spans]
        assert labelled == [end in endings for _, end in row.spans]
        assert all(labelled[:-1])
        assert labelled[-1] is not inside
