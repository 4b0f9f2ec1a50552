"""Token ids of rendered chats, piece by piece, so that what comes again is encoded once.

A tokenizer cuts a text before it looks anything up: at special tokens, and most of them between words. A piece between
two such places has the same ids wherever it stands.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, pairwise, product
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 2_000_000  # of remembered pieces, some 40 MB with their ids; then it begins anew
PRINTED = "".join(map(chr, range(ord("!"), ord("~") + 1)))
# A space alone between two characters that every pre-tokenizer takes for something else than space.
_WORD = r" (?=[!-~])(?<=[!-~] )"
# What lets an expression know more than the text ahead: looks behind, and ends of words, lines or the text.
_BACK = re.compile(r"\(\?<|\\[bBAGKZz]|(?<!\[)[\^$]")


@dataclass
class _Pieces:
    """How the texts of a tokenizer are cut, and the ids of pieces so far."""

    starts: re.Pattern[str]
    known: dict[str, tuple[int, ...]] = field(default_factory=dict)
    characters: int = 0


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of whole texts, without special tokens of the tokenizer's own.

    A chat template writes those itself; letting the tokenizer add its own would double the first one.
    """
    if not tokenizer.is_fast:
        encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return encoded
    pieces = _pieces(tokenizer, len(tokenizer))
    ids = [list(chain.from_iterable(each)) for each in _piece_ids(pieces, tokenizer, _cut(pieces.starts, texts))]
    _forget(pieces)
    return ids


def encode_marked(
    tokenizer: PreTrainedTokenizerBase, text: str, marked: Sequence[tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text, and the spans of tokens that overlap spans of its characters.

    Args:
        tokenizer: a fast one.
        marked: ``[start, end)``, in order and apart.

    Returns:
        Ids, and spans in order, joined where they touch.
    """
    pieces = _pieces(tokenizer, len(tokenizer))
    places = _places(pieces.starts, text, 0)
    cut = _between(text, places)
    [ids] = _piece_ids(pieces, tokenizer, [cut])
    before = [0, *accumulate(map(len, ids))]

    def tokens(character: int, beginning: bool) -> int:
        """How many tokens end before a character; with ``beginning``, how many begin before it."""
        piece = bisect_right(places, character) - 1
        within = character - places[piece]
        if not within:
            return before[piece]
        offsets = _offsets(tokenizer, cut[piece])
        return before[piece] + sum((start < within) if beginning else (end <= within) for start, end in offsets)

    spans: list[tuple[int, int]] = []
    for first, behind in marked:
        start, end = tokens(first, beginning=False), tokens(behind, beginning=True)
        if start >= end:
            continue
        if spans and start <= spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, end))
    _forget(pieces)
    return list(chain.from_iterable(ids)), spans


def _offsets(tokenizer: PreTrainedTokenizerBase, piece: str) -> list[tuple[int, int]]:
    """Where tokens begin and end, with the spaces that they begin with, which some tokenizers leave out."""
    found: list[tuple[int, int]] = []
    behind = 0
    for start, end in _backend(tokenizer).encode(piece, add_special_tokens=False).offsets:
        found.append((start if piece[behind:start].strip(" ") else min(start, behind), end))
        behind = end
    return found


def _piece_ids(
    pieces: _Pieces, tokenizer: PreTrainedTokenizerBase, cut: Sequence[Sequence[str]]
) -> list[list[tuple[int, ...]]]:
    known = pieces.known
    if fresh := [piece for piece in dict.fromkeys(chain.from_iterable(cut)) if piece not in known]:
        # Without offsets, which would take a third of the time.
        encoded = _backend(tokenizer).encode_batch_fast(fresh, add_special_tokens=False)
        for piece, encoding in zip(fresh, encoded, strict=True):
            known[piece] = tuple(encoding.ids)
            pieces.characters += len(piece)
    return [[known[piece] for piece in each] for each in cut]


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The tokenizer that neither cuts nor pads; its file, or a call before, may have said otherwise."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _forget(pieces: _Pieces) -> None:
    if pieces.characters > MOST_CHARACTERS:
        pieces.known.clear()
        pieces.characters = 0


def _cut(starts: re.Pattern[str], texts: Sequence[str]) -> list[list[str]]:
    """The pieces of each text; a beginning of the longest one is not looked through again."""
    longest = max(texts, key=len)
    places = _places(starts, longest, 0)
    pieces = _between(longest, places)
    cut = []
    for text in texts:
        # Without what follows, the last place in the text may be none.
        shared = max(0, bisect_left(places, len(text)) - 2) if longest.startswith(text) else 0
        cut.append(pieces[:shared] + _between(text, _places(starts, text, places[shared])))
    return cut


def _places(starts: re.Pattern[str], text: str, begin: int) -> list[int]:
    return [begin, *(match.start() for match in starts.finditer(text, begin + 1))]


def _between(text: str, places: list[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([*places, len(text)])]


@lru_cache(maxsize=8)
def _pieces(tokenizer: PreTrainedTokenizerBase, _: int) -> _Pieces:
    """The last argument, the size of the vocabulary, is what a tokenizer may be changed in."""
    added = list(tokenizer.added_tokens_decoder.values())
    # Not before those that take the space in front along, nor where a place may be one within another token.
    within = {
        token.content[start:end]
        for token in added
        for start in range(1, len(token.content))
        for end in range(start + 1, len(token.content) + 1)
    }
    special = [
        token.content
        for token in added
        if token.special
        and not (token.lstrip or token.normalized)
        and within.isdisjoint(token.content[:end] for end in range(1, len(token.content) + 1))
    ]
    longest_first = map(re.escape, sorted(special, key=len, reverse=True))
    # Words first: some tokenizers have thousands of special tokens.
    kinds = [*([_WORD] if _parts_words(tokenizer) else []), *longest_first]
    return _Pieces(re.compile("|".join(kinds) or "(?!)"))


def _parts_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer always cuts where `_WORD` does, and looks at each side alone.

    It does if its added tokens leave lone spaces to the text, its normalizer changes no ASCII, and its pre-tokenizer,
    made of expressions that read from left to right, is seen to cut in all kinds of surroundings.
    """
    for token in tokenizer.added_tokens_decoder.values():
        if token.rstrip or token.single_word or re.search(r"(?<! ) (?! )", token.content):
            return False
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None and _state(backend.normalizer)["type"] != "NFC":
        return False
    if getattr(backend.model, "dropout", None) or backend.pre_tokenizer is None:
        return False
    if not _reads_forward(_state(backend.pre_tokenizer)):
        return False
    parts = backend.pre_tokenizer.pre_tokenize_str
    surroundings = ("", "a", "é", "'", ".", "\n", " ")
    sides = chain(
        ((last, " " + first) for last, first in product(PRINTED, PRINTED)),
        (
            (before + last, " " + first + behind)
            for before, last, first, behind in product(surroundings, "aZ7'.<_(", "aZ7'.<_(s", surroundings)
        ),
    )
    return all(
        [text for text, _ in parts(left + right)] == [text for side in (left, right) for text, _ in parts(side)]
        for left, right in sides
    )


def _reads_forward(state: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer is made of kinds that decide by what they match, not by the place in the text."""
    if state["type"] == "Sequence":
        return all(_reads_forward(part) for part in state["pretokenizers"])
    if state["type"] == "ByteLevel":
        return not bool(state["add_prefix_space"])
    if state["type"] == "Split":
        isolates = state["behavior"] == "Isolated" and not state["invert"]
        return isolates and not _BACK.search(state["pattern"].get("Regex", "^"))
    return bool(state["type"] == "Digits")


def _state(part: Any) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(part.__getstate__())
    except Exception:  # tokenizers raises no other; a part that is written in Python has no state to look at
        return {"type": "custom"}
    return state
