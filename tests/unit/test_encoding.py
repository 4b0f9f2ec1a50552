"""Token ids by pieces, against the tokenizer's own of the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_chat_templates import FAMILIES, make_tokenizer
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from medusa_train.data import encoding
from medusa_train.data.encoding import encode_marked, encode_texts

# As in Llama 3, Qwen and what follows them.
FORWARD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), BYTES])


def changed(**parts: object) -> PreTrainedTokenizerFast:
    """The ChatML tokenizer with other parts."""
    tokenizer = make_tokenizer("chatml")
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def with_token(content: str, **options: bool) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer("chatml")
    tokenizer.add_tokens([AddedToken(content, **options)], special_tokens=options.pop("special", False))
    return tokenizer


TOKENIZERS = {
    **{name: make_tokenizer(name) for name in FAMILIES},
    "trimmed offsets": changed(post_processor=processors.ByteLevel(add_prefix_space=False, trim_offsets=True)),
    "split": changed(pre_tokenizer=split(FORWARD)),
    "digits": changed(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "composed": changed(normalizer=normalizers.NFC()),
    "a token that takes spaces": with_token("<gap>", rstrip=True),
    "a token of words": with_token("is a"),
    "overlapping tokens": with_token("it<|", special=True),
}
FRAGMENTS = [
    "<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<｜User｜>", "<gap>", "it<|", "is", " a", " ", "  ", "\n", "\t",
    "'s", "It", "cat", "é", "e\u0301", "中", "\u00a0", "\u2028", "7", "1234", ".", "...", "(", "🐈",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)


def whole(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(derandomize=True, deadline=None, max_examples=150)
@given(text=texts, end=st.integers(0, 30))
@example(text="It is<|im_end|>", end=8)
@example(text="it<|im_end|> is a <gap> cat", end=23)
def test_pieces_have_the_ids_of_the_whole_text_and_of_its_beginning(name, text, end):
    tokenizer = TOKENIZERS[name]
    given = [text[:end], text, "cat"]
    assert encode_texts(tokenizer, given) == [whole(tokenizer, each).ids for each in given]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(text=texts, cuts=st.lists(st.integers(0, 40), max_size=6))
@example(text=" a", cuts=[0, 1])
def test_marked_tokens_are_those_that_overlap_marked_characters(name, text, cuts):
    tokenizer = TOKENIZERS[name]
    places = sorted(min(cut, len(text)) for cut in cuts)
    marked = list(zip(places[::2], places[1::2], strict=False))
    encoded = whole(TOKENIZERS["chatml"] if name == "trimmed offsets" else tokenizer, text)
    mask = [any(begin < last and end > first for first, last in marked) for begin, end in encoded.offsets]
    ids, spans = encode_marked(tokenizer, text, marked)
    assert ids == encoded.ids
    assert [any(start <= place < end for start, end in spans) for place in range(len(ids))] == mask
    assert all(start < end for start, end in spans)
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


def pieces_of(tokenizer, text):
    return encoding._cut(encoding._pieces(tokenizer, len(tokenizer)).starts, [text])[0]


@pytest.mark.parametrize("name", ["chatml", "llama3", "split", "digits", "composed"])
def test_words_are_pieces_where_the_tokenizer_parts_them(name):
    assert pieces_of(TOKENIZERS[name], "It is  a cat") == ["It", " is  a", " cat"]


class Apart:
    """A pre-tokenizer that parts nothing."""

    def pre_tokenize(self, text: object) -> None:
        pass


LOOKS_BACK = {
    "metaspace": TOKENIZERS["gemma"],
    "no words": changed(pre_tokenizer=pre_tokenizers.Split(Regex("x"), "isolated")),
    "none": changed(pre_tokenizer=pre_tokenizers.Split("x", "isolated")),
    "pairs of words": changed(pre_tokenizer=split(r"\w+ \w+|\s+|\w+|[^\w\s]+")),
    "prices": changed(pre_tokenizer=split(r"\$ \d+|" + FORWARD)),
    "spaces apart from words": changed(pre_tokenizer=split(r"\w+\s+|\s+|[^\s\w]+")),
    "look behind": changed(pre_tokenizer=split(FORWARD + r"|(?<=x) cat")),
    "ends of words": changed(pre_tokenizer=split(FORWARD + r"|\b cat")),
    "beginning": changed(pre_tokenizer=split(r"^ cat|" + FORWARD)),
    "removes": changed(pre_tokenizer=pre_tokenizers.Split(Regex(FORWARD), "removed")),
    "written in Python": changed(pre_tokenizer=pre_tokenizers.PreTokenizer.custom(Apart())),
    "space in front": changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "changes words": changed(normalizer=normalizers.Replace(" ", "_")),
    "a token that takes spaces": TOKENIZERS["a token that takes spaces"],
    "a token of words": TOKENIZERS["a token of words"],
    "a whole word": with_token("cat", single_word=True),
}


@pytest.mark.parametrize("name", LOOKS_BACK)
def test_words_are_no_pieces_where_their_surroundings_may_matter(name):
    assert pieces_of(LOOKS_BACK[name], "It is a cat") == ["It is a cat"]


def test_a_dropout_of_merges_is_drawn_for_every_text():
    tokenizer = make_tokenizer("chatml")
    tokenizer.backend_tokenizer.model.dropout = 0.5
    assert pieces_of(tokenizer, "It is a cat") == ["It is a cat"]


def test_tokens_that_could_overlap_others_are_no_places_to_cut():
    assert pieces_of(TOKENIZERS["overlapping tokens"], "it<|im_end|>") == ["it<|im_end|>"]


def test_what_is_remembered_is_bounded(monkeypatch):
    tokenizer = make_tokenizer("chatml")
    monkeypatch.setattr(encoding, "MOST_CHARACTERS", 20)
    pieces = encoding._pieces(tokenizer, len(tokenizer))
    for number in range(50):
        text = f"It is a cat {number}"
        assert encode_texts(tokenizer, [text]) == [whole(tokenizer, text).ids]
        assert encode_marked(tokenizer, text, [(3, 5)])[0] == whole(tokenizer, text).ids
        assert sum(map(len, pieces.known)) == pieces.characters <= 20
    assert pieces.known


def test_a_token_that_is_added_later_is_one():
    tokenizer = make_tokenizer("chatml")
    assert len(encode_texts(tokenizer, ["<|new|>"])[0]) > 1
    tokenizer.add_tokens(["<|new|>"], special_tokens=True)
    assert encode_texts(tokenizer, ["<|new|>"]) == [[tokenizer.convert_tokens_to_ids("<|new|>")]]
