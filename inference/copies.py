"""Copies: what followed the same words earlier in the prompt or the output.

A text's last few tokens have often come before, in what it quotes, sums up or repeats, and what came next then is a
guess that costs no model (prompt lookup, Saxena 2023). `prompt_lookup` drafts such copies as they are; heads with
``reads_copies`` read them beside the hidden state and learn when to trust them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.inference.heads_config import MOST_COPIED

NO_COPY = -1
HEADS_NGRAMS = (4, 2)  # longest and shortest words that heads' copies are looked up by


class NgramIndex:
    """A growing text, and where each of its n-grams was last followed by something."""

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self.text: list[int] = []
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._follower: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Put tokens behind the text."""
        for token in tokens:
            position = len(self.text)
            for size in self._sizes:
                if size <= position:
                    self._follower[tuple(self.text[position - size :])] = position
            self.text.append(token)

    def continuation(self, count: int) -> list[int] | None:
        """``count`` tokens after the latest earlier occurrence of the text's last n-gram, longest n first.

        A copy that runs into the end of the text goes on with itself, so that a loop is continued as a loop.
        """
        for size in self._sizes:
            start = self._follower.get(tuple(self.text[-size:])) if size <= len(self.text) else None
            if start is not None:
                copy = self.text[start : start + count]
                while len(copy) < count:
                    copy += copy[: count - len(copy)]
                return copy
        return None


class CopyFinder:
    """Copies for a batch of texts that grow from call to call."""

    def __init__(self, rows: int, count: int, max_ngram: int, min_ngram: int) -> None:
        """Prepare ``rows`` empty texts, and copies of ``count`` tokens."""
        self.count = count
        self._indices = [NgramIndex(max_ngram, min_ngram) for _ in range(rows)]

    def __call__(
        self, texts: Sequence[Sequence[int]], numbers: Sequence[int], active: Sequence[int]
    ) -> list[list[int] | None]:
        """Per text, ``count`` tokens, or None.

        Args:
            texts: whole texts, each the one of an earlier call grown longer.
            numbers: which of the rows each text is.
            active: places of the texts that a copy is wanted for.
        """
        copies: list[list[int] | None] = [None] * len(texts)
        for place in active:
            index = self._indices[numbers[place]]
            index.extend(texts[place][len(index.text) :])
            copies[place] = index.continuation(self.count)
        return copies


class CopyRecord:
    """How often what was copied for one text came true, token after token."""

    def __init__(self) -> None:
        """Begin: a copied token is as often right as wrong, until the text says otherwise."""
        self._right, self._seen = 1.0, 2.0
        self._copy: Sequence[int] = ()
        self._length = 0

    def rate(self, text: Sequence[int], copy: Sequence[int] | None) -> float:
        """Learn what became of the last copy.

        Args:
            text: the one of the last call grown longer.
            copy: what may follow now.

        Returns:
            The share of copied tokens, each behind right ones, that were right.
        """
        for copied, token in zip(self._copy, text[self._length :], strict=False):
            self._seen += 1
            if copied != token:
                break
            self._right += 1
        self._copy, self._length = copy or (), len(text)
        return self._right / self._seen


def copied_ids(copies: Sequence[Sequence[int] | None], count: int, device: torch.device) -> Tensor | None:
    """Copies of ``count`` tokens as ``(B, count)`` ids, `NO_COPY` where there is none; None where no row has any."""
    if not any(copies):
        return None
    return torch.tensor([copy or [NO_COPY] * count for copy in copies], device=device)


def copies_in(text: Sequence[int], start: int, end: int) -> Tensor:
    """The copies that heads would read as a text was written.

    Returns:
        ``(end - start, MOST_COPIED)`` int32: for every position of ``text[start:end]``, what follows the latest earlier
        occurrence of the words that end with it; `NO_COPY` where they are new.
    """
    index = NgramIndex(*HEADS_NGRAMS)
    index.extend(text[:start])
    copies = []
    for token in text[start:end]:
        index.extend([token])
        copies.append(index.continuation(MOST_COPIED) or [NO_COPY] * MOST_COPIED)
    return torch.tensor(copies, dtype=torch.int32).view(-1, MOST_COPIED)


def agreeing(copies: Tensor, path: Tensor) -> Tensor:
    """Copies as far as what was drafted agrees with them: a copy whose first tokens were not taken says nothing.

    Args:
        copies: ``(..., m)`` what may follow a root.
        path: ``(..., d)`` the root and the tokens drafted after it, d <= m.

    Returns:
        ``(..., d)``: the copied token after each of them, `NO_COPY` from the first disagreement on.
    """
    depth = path.shape[-1]
    if depth == 1:  # nothing was drafted yet
        return copies[..., :1]
    taken = (copies[..., : depth - 1] == path[..., 1:]).cumprod(dim=-1)
    return copies[..., :depth].where(torch.nn.functional.pad(taken, (1, 0), value=1) > 0, NO_COPY)
