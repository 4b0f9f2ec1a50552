"""Which turns that a model wrote are kept: no fragments, and none that nearly repeats another."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.data.synthesis import NEAR, Seen, is_whole

QUESTIONS = [
    "what is the best way to learn python?",
    "how do i bake bread without yeast?",
    "write a poem about the sea in winter.",
    "explain why the sky is blue to a child.",
]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("What is the capital of France?", True),
        ("Sort these numbers: 3, 1, 2", True),
        ("Write a poem about the sea", True),
        ("Too short, this", False),
        ("Here are some of the things that I,", False),
        ("Consider the following list of names:", False),
        ("I went to the shop and", False),
        ("Tell me more about the brand", True),
    ],
)
def test_a_turn_that_breaks_off_is_a_fragment(text, whole):
    assert is_whole(text) == whole


def test_other_questions_are_new_and_near_repetitions_are_not():
    seen = Seen()
    assert all(seen.add(question) for question in QUESTIONS)
    assert not any(seen.add(question) for question in QUESTIONS)
    assert not seen.add("what is the best way to learn python")
    assert seen.add("what is the best way to cook rice for ten people?")
    assert not seen.add("what is the best way to cook rice for ten peoples?")


words = st.lists(st.text(string.ascii_lowercase, min_size=1, max_size=6), min_size=4, max_size=20).map(" ".join)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(texts=st.lists(words, min_size=2, max_size=8))
def test_what_is_refused_shares_most_of_its_shingles_with_one_that_was_kept(texts):
    """The reverse holds but for the odds of MinHash, and always for equal texts."""

    def shingles(text):
        return {text[i : i + 5] for i in range(len(text) - 4)}

    seen, kept = Seen(), []
    for text in texts + texts:
        near = max(
            (len(shingles(text) & shingles(other)) / len(shingles(text) | shingles(other)) for other in kept), default=0
        )
        if seen.add(text):
            assert near < 1
            kept.append(text)
        else:
            assert near >= NEAR


def test_the_shortest_texts_are_compared_too():
    seen = Seen()
    assert seen.add("a")
    assert not seen.add("a")
    assert seen.add("")
    assert seen.add("猫")
