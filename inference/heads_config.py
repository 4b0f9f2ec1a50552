"""The shape of a set of heads; without torch, so that a recipe can be checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from medusa_train.inference.errors import UserError

HeadsKind = Literal["medusa", "hydra", "recurrent"]
Projection = Literal["own", "shared"]
MOST_COPIED = 5  # tokens of a copy that are cached for training


@dataclass(frozen=True)
class HeadsConfig:
    """Shape of a set of heads.

    Attributes:
        num_heads: K, how many tokens ahead of the backbone the heads reach.
        num_layers: residual blocks per head, or of a recurrent drafter.
        hidden_size: width of the backbone's last hidden state.
        vocab_size: rows of the backbone's output projection.
        draft_vocab_size: rows of each head's projection; 0 for the whole vocabulary.
        kind: ``medusa`` heads read the hidden state alone, ``hydra`` heads also the tokens that they continue; in a
            ``recurrent`` drafter, all heads are the same weights, which read these tokens one by one.
        lm_head: ``own`` gives every head a projection to train; ``shared`` ends all of them in the backbone's, which
            is neither trained nor saved.
        reads_copies: whether heads also read what followed the last time that the text's last words came.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int = 0
    kind: HeadsKind = "medusa"
    lm_head: Projection = "own"
    reads_copies: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 0 or self.hidden_size < 1 or self.vocab_size < 1:
            raise UserError(f"heads: sizes must be positive, got {self}")
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"heads.draft_vocab_size={self.draft_vocab_size} is outside 0..{self.vocab_size} (the vocabulary)"
            )
        if self.reads_embeddings and self.num_layers < 1:
            what = f"{self.kind} heads" if self.reads_tokens else "heads that read copies"
            raise UserError(f"heads.num_layers must be at least 1 for {what}: the first layer reads the tokens")
        if self.reads_copies and self.num_heads > MOST_COPIED:
            raise UserError(
                f"heads.num_heads={self.num_heads}: copies are {MOST_COPIED} tokens long; use fewer heads, or "
                "heads.reads_copies: false"
            )
        if self.lm_head == "shared" and self.num_layers < 1:
            raise UserError("heads.num_layers must be at least 1 with a shared lm_head: nothing else is trained")

    @property
    def projection_size(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def reads_tokens(self) -> bool:
        """Whether a draft depends on the tokens before it, and not on the hidden state alone."""
        return self.kind != "medusa"

    @property
    def reads_embeddings(self) -> bool:
        """Whether heads read embeddings of tokens, drafted or copied."""
        return self.reads_tokens or self.reads_copies

    @property
    def weight_sets(self) -> int:
        """How many heads have weights of their own."""
        return 1 if self.kind == "recurrent" else self.num_heads

    def input_size(self, head: int, layer: int) -> int:
        """What a residual block reads: the hidden state and, in the first, embeddings of tokens."""
        if layer > 0:
            return self.hidden_size
        tokens = {"medusa": 0, "hydra": head + 1, "recurrent": 1}[self.kind]
        return (1 + tokens + self.reads_copies) * self.hidden_size
