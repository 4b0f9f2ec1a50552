"""Medusa heads: what is trained, and nothing else.

Head k (k = 1..K) reads the backbone's last hidden state h_t, the one whose own projection predicts token t+1, and
predicts token t+k+1 (Cai et al. 2024, "Medusa", section 2.1.1). Every residual block computes x + SiLU(W x + b);
W and b start at zero and the projection starts as a copy of the backbone's, so a fresh head's logits are exactly
the backbone's.

Hydra heads (Ankner et al. 2024, "Hydra", section 3) know what they continue: head k also reads the embeddings of the
root token t+1 and of the k-1 tokens drafted after it. Here they enter its first residual block, beside the hidden
state: x + SiLU(W [x; e_1; ...; e_k] + b).

A recurrent drafter (after Cheng et al. 2024, "Recurrent Drafter") is one set of weights for all depths: the same
blocks read one token after the other, x_k = blocks(x_{k-1}, e_k) from x_0 = h_t, and depth k projects x_k.

A hidden state says little about what the text will repeat. Heads of any kind may also read a copy: the embedding of
the token that stood k places behind the root's words when they last came (`copies`), zeros where they are new. It
enters the first block beside the rest, as long as the tokens drafted so far are those of the copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from medusa_train.inference.errors import UserError
from medusa_train.inference.heads_config import HeadsConfig

if TYPE_CHECKING:
    from medusa_train.inference.backbone import Backbone


class ResidualBlock(nn.Module):
    """x + SiLU(W [x; more] + b), the identity at the start: ``(..., hidden)`` -> ``(..., hidden)``."""

    def __init__(self, hidden_size: int, input_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)  # SiLU(0) = 0 only with a zero bias: a fresh head must equal the backbone

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(torch.cat([x, *more], dim=-1) if more else x))


class MedusaHeads(nn.Module):
    """K heads over one hidden state.

    ``draft_token_ids`` ``(V',)`` maps a head's columns to token ids; it is ``0..V-1`` for a whole vocabulary.
    """

    draft_token_ids: Tensor

    def __init__(self, config: HeadsConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        columns = config.projection_size
        if draft_token_ids is None:
            # A reduced vocabulary without a list is the lowest ids; training always passes the most frequent ones.
            draft_token_ids = torch.arange(columns)
        if draft_token_ids.shape != (columns,):
            raise UserError(f"draft_token_ids has {tuple(draft_token_ids.shape)} entries, the heads need ({columns},)")
        self.register_buffer("draft_token_ids", draft_token_ids.long())
        self.heads = nn.ModuleList(
            nn.ModuleList(
                ResidualBlock(config.hidden_size, config.input_size(head, layer)) for layer in range(config.num_layers)
            )
            for head in range(config.weight_sets)
        )
        if config.lm_head == "own":
            for head in self.heads:
                cast(nn.ModuleList, head).append(nn.Linear(config.hidden_size, columns, bias=False))
        self.shared: nn.Module | None = None  # the backbone's projection, see `share_projection`

    @classmethod
    def for_backbone(
        cls, backbone: Backbone, config: HeadsConfig, draft_token_ids: Tensor | None = None
    ) -> MedusaHeads:
        """Fresh heads in fp32 whose logits equal the backbone's (on the draft vocabulary).

        Raises:
            UserError: heads that read embeddings, for a backbone whose embeddings are not as wide as its hidden states.
        """
        check_embeddings(config, backbone)
        heads = cls(config, draft_token_ids).to(backbone.device)
        if config.lm_head == "shared":
            heads.share_projection(backbone)
            return heads
        rows = backbone.projection_rows(heads.draft_token_ids if config.draft_vocab_size else None).float()
        with torch.no_grad():
            for head in heads.heads:
                projection = head[-1]  # type: ignore[index]
                projection.weight.copy_(rows)
        return heads

    def share_projection(self, backbone: Backbone) -> None:
        """Let every head end in a frozen copy of the backbone's projection; nothing to do for heads of their own."""
        if self.config.lm_head == "own":
            return
        like = next(self.parameters())
        rows = backbone.projection_rows(self.draft_token_ids if self.config.draft_vocab_size else None).to(like)
        self.shared = nn.Linear(self.config.hidden_size, len(rows), bias=False, device="meta")
        self.shared.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, hidden: Tensor, head: int, before: Tensor | None = None, copied: Tensor | None = None) -> Tensor:
        """Raw projections of one head.

        A backbone that scales or caps its logits (`Backbone.shape_logits`) does the same to these.

        Args:
            hidden: ``(..., hidden)`` last hidden states.
            head: ``0..K-1``.
            before: ``(..., head + 1, hidden)`` embeddings of the root and the tokens drafted since, as
                `candidates.embeddings` makes them; medusa heads do not look at them.
            copied: ``(..., head + 1, hidden)`` embeddings of the copied token after each of these, zeros for none;
                only heads with ``reads_copies`` look at them.

        Returns:
            ``(..., V')``.

        Raises:
            UserError: the heads share the backbone's projection and were not given one.
        """
        return self.project(self.read(hidden, head, before, copied), head)

    def read(self, hidden: Tensor, head: int, before: Tensor | None = None, copied: Tensor | None = None) -> Tensor:
        """What a head makes of a hidden state, ``(..., hidden)``; arguments as of `forward`.

        A recurrent drafter goes on from where it is: instead of the hidden state it takes what an earlier call
        returned, and then the tokens since alone.
        """
        blocks = list(cast(nn.ModuleList, self._weights(head)))[: self.config.num_layers]
        x = hidden
        for more in self._readings(hidden, before, copied):
            for block in blocks:
                x, more = block(x, *more), ()
        return x

    def project(self, states: Tensor, head: int) -> Tensor:
        """States ``(..., hidden)`` of `read` to raw projections ``(..., V')``.

        Raises:
            UserError: the heads share the backbone's projection and were not given one.
        """
        logits: Tensor = self.projection(head)(states)
        return logits

    def projection(self, head: int) -> nn.Linear:
        """The module that `project` calls, with a weight ``(V', hidden)`` and no bias; raises like it."""
        projection = self._weights(head)[-1] if self.config.lm_head == "own" else self.shared  # type: ignore[index]
        if projection is None:
            raise UserError("these heads end in the backbone's projection; call heads.share_projection(backbone) first")
        return cast(nn.Linear, projection)

    def _weights(self, head: int) -> nn.Module:
        return self.heads[min(head, self.config.weight_sets - 1)]

    def _readings(self, hidden: Tensor, before: Tensor | None, copied: Tensor | None) -> list[tuple[Tensor, ...]]:
        """What the first block reads beside the state, for each time that the blocks are run."""
        config = self.config
        reads: list[Tensor] = []
        runs = 1
        if config.reads_tokens:
            assert before is not None, f"{config.kind} heads read the tokens before them"
            runs = before.shape[-2] if config.kind == "recurrent" else 1
            reads.append(before)
        if config.reads_copies:
            assert copied is not None, "these heads read copies"
            # As many as there are runs of the blocks: the one after every token, or the last alone.
            reads.append(copied[..., -runs:, :])
        if not reads:
            return [()]
        parts = [each.to(hidden) for each in reads]
        more = [part.flatten(-2)[..., None, :] if part.shape[-2] != runs else part for part in parts]
        return list(zip(*(part.unbind(-2) for part in more), strict=True))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``medusa_lm_head.safetensors`` and ``config.json``; see `checkpoint.save_heads`."""
        from medusa_train.inference.checkpoint import save_heads

        save_heads(folder, self)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MedusaHeads:
        """Strictly load what `save_pretrained` wrote, or a Hub repository of heads."""
        from medusa_train.inference.checkpoint import load_heads

        return load_heads(folder).heads


def check_embeddings(config: HeadsConfig, backbone: Backbone) -> None:
    """Refuse heads that read embeddings on a backbone whose embeddings are not as wide as its hidden states."""
    if config.reads_embeddings and backbone.embedding_size != config.hidden_size:
        kind = f"{config.kind} heads" if config.reads_tokens else "heads that read copies"
        instead = "heads.kind: medusa" if config.reads_tokens else "heads.reads_copies: false"
        raise UserError(
            f"{kind} need embeddings as wide as the hidden states ({config.hidden_size}), "
            f"{backbone.source or 'this backbone'} has {backbone.embedding_size}; use {instead}"
        )
