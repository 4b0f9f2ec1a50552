"""A server as an arm, without one: its events, its clock and its counters are given."""

from types import SimpleNamespace

import pytest

import medusa_train.eval.server
from medusa_train.data.chat import TOOLS
from medusa_train.eval.questions import Question
from medusa_train.eval.server import Server
from medusa_train.inference import UserError

QUESTION = Question([{"role": "user", "content": "one"}], ("two",))


def said(text):
    return {"choices": [{"delta": {"content": text}}]}


@pytest.fixture
def given(monkeypatch):
    """What the server sends, a second apart, and its pages of metrics; None where it has none."""
    sent = SimpleNamespace(seconds=100.0, events=[], pages=[], messages=[])
    monkeypatch.setattr(medusa_train.eval.server, "perf_counter", lambda: sent.seconds)

    def events(server, messages, max_new_tokens):
        sent.messages.append([message["content"] for message in messages])
        for event in sent.events:
            sent.seconds += 1
            yield event

    def opened(server, path, body=None):
        if (page := sent.pages.pop(0)) is None:
            raise UserError("no such page")
        return page

    monkeypatch.setattr(Server, "_events", events)
    monkeypatch.setattr(Server, "_open", opened)
    return sent


class Page:
    def __init__(self, *lines):
        self.text = "\n".join(lines)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self):
        return self.text.encode()


def test_the_clock_starts_with_the_first_text_and_stops_with_the_last_event(given):
    given.events = [
        {"choices": [{"delta": {"role": "assistant"}}]}, said("a"), said("b"), said(""), {"choices": [], "usage": None},
        {"choices": [], "usage": {"completion_tokens": 7}},
    ]  # fmt: skip
    given.pages = [None] * 4
    ((first, second),) = Server("http://x", "m", "").ask([QUESTION], 9)
    for turn in (first, second):
        assert (turn.tokens, turn.prefill_tokens, turn.text) == (7, 1, "ab")
        assert (turn.prefill_seconds, turn.decode_seconds) == (2, 4)
        assert turn.drafting == {}
    assert given.messages == [["one"], ["one", "ab", "two"]]


def test_counters_of_all_engines_are_added_and_the_answers_own_part_is_taken(given):
    def page(drafts, accepted, drafted):
        return Page(
            "# HELP vllm:spec_decode_num_drafts_total drafts",
            *(f'vllm:spec_decode_num_drafts_total{{engine="{n}"}} {drafts}.0' for n in (0, 1)),
            f"vllm:spec_decode_num_accepted_tokens_total {accepted}.0",
            f'vllm:spec_decode_num_accepted_tokens_total_created{{engine="0"}} {drafted}.5',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0',
        )

    given.events = [said("a"), {"usage": {"completion_tokens": 7}}]
    given.pages = [page(10, 30, 60), page(12, 35, 72)]
    ((turn,),) = Server("http://x", "m", "").ask([Question(QUESTION.messages)], 9)
    assert turn.drafting == {"drafts": 4, "accepted": 5, "drafted": 12}


def test_an_answer_without_a_count_of_its_tokens_is_refused(given):
    given.events, given.pages = [said("a")], [None] * 2
    with pytest.raises(UserError, match="does not count its tokens"):
        Server("http://x", "m", "").ask([QUESTION], 9)


def test_declared_tools_cannot_be_asked(given):
    with pytest.raises(UserError, match="takes calls of tools apart"):
        Server("http://x", "m", "").ask([Question([{"role": TOOLS, "content": []}, *QUESTION.messages])], 9)
