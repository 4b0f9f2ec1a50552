"""Training samples from the hidden-state cache, and the draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medusa_train.data.hidden_states import Shard
from medusa_train.inference.heads_config import MOST_COPIED

IGNORED = -100


class HeadsDataset(Dataset[dict[str, Tensor]]):
    """One sample per cached position that has at least head 1's target.

    A sample is ``index`` ``()``, its number; ``hidden`` ``(hidden,)``, the heads' input; ``roots`` ``()``, the token
    after it; ``labels`` ``(K,)``, the tokens after that, which heads 1..K should predict, ``IGNORED`` past the end of
    the answer; ``teacher_hidden`` ``(K, hidden)``, the states whose projections are the backbone's own distributions at
    those tokens; ``copies`` ``(MOST_COPIED,)``, what followed the root's words before. Samples are fetched a batch at a
    time (`__getitems__`), since picking single positions from memory-mapped shards would cost more than training on
    them.
    """

    def __init__(self, shards: Sequence[Shard], num_heads: int) -> None:
        self.shards, self.num_heads = shards, num_heads
        self._usable = [_usable(shard) for shard in shards]
        self._starts = torch.tensor([0] + [len(usable) for usable in self._usable]).cumsum(0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.__getitems__([index])
        return {name: tensor[0] for name, tensor in batch.items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A collated batch: every tensor of a sample with a leading batch dimension, in the order asked."""
        wanted = torch.as_tensor(indices)
        homes = torch.searchsorted(self._starts, wanted, right=True) - 1
        like = self.shards[0].states(slice(0, 0))
        states = torch.empty(len(wanted), self.num_heads + 1, like.shape[1], dtype=like.dtype)
        roots = torch.empty(len(wanted), dtype=torch.long)
        labels = torch.full((len(wanted), self.num_heads), IGNORED)
        copies = torch.empty(len(wanted), MOST_COPIED, dtype=torch.long)
        for home in homes.unique().tolist():
            members = (homes == home).nonzero()[:, 0]
            shard = self.shards[home]
            positions = self._usable[home][wanted[members] - self._starts[home]]
            ahead = positions[:, None] + torch.arange(self.num_heads + 1)
            inside = ahead < shard.ends[positions][:, None]
            ahead = torch.where(inside, ahead, positions[:, None])  # any valid place; its label is ignored
            states[members] = shard.states(ahead)
            roots[members] = shard.tokens[positions]
            copies[members] = shard.copies[positions].long()
            labels[members] = torch.where(inside[:, 1:], shard.tokens[ahead[:, 1:]], IGNORED)
        return {
            "index": wanted,
            "hidden": states[:, 0],
            "roots": roots,
            "teacher_hidden": states[:, 1:],
            "labels": labels,
            "copies": copies,
        }

    def place(self, index: int) -> str:
        """Where a sample is cached, for messages: shard and position, ``00002:1234``."""
        home = int(torch.searchsorted(self._starts, index, right=True)) - 1
        return f"{home:05d}:{int(self._usable[home][index - int(self._starts[home])])}"


def draft_vocabulary(answers: Iterable[Tensor], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The ``size`` most frequent tokens of ``answers``, in rising order, and the share of all that they cover.

    Equally frequent tokens are taken from the lowest id up, so the choice is the same on every machine.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for tokens in answers:
        counts += torch.bincount(tokens, minlength=vocab_size)
    kept = counts.argsort(descending=True, stable=True)[:size].sort().values
    return kept, float(counts[kept].sum() / counts.sum())


def _usable(shard: Shard) -> Tensor:
    positions = torch.arange(len(shard.tokens))
    return positions[positions + 1 < shard.ends]
