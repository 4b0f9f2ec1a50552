"""The public face of decoding: a backbone, its heads and a tree."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa_train.inference.attention import check_tree_attention
from medusa_train.inference.backbone import Backbone, load_backbone
from medusa_train.inference.checkpoint import load_heads
from medusa_train.inference.cpu_linear import can_pack, pack_linears
from medusa_train.inference.decode import Block, FinishReason, Verify, decode
from medusa_train.inference.drafters import Drafter, MedusaDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.tree import Tree
from medusa_train.inference.verify import Sampling, VerifierName, verify_greedy, verify_rejection

# Eight tokens a pass suit most devices at batch 1; `medusa-train tree` replaces it by a measured choice.
DEFAULT_PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


@dataclass(frozen=True)
class Generation:
    """What `MedusaModel.generate` returns.

    Attributes:
        sequences: ``(1, prompt + new)`` token ids.
        finish_reason: why it ended; see `Block`.
        stats: counters and times.
    """

    sequences: Tensor
    finish_reason: FinishReason
    stats: DecodeStats


class MedusaModel:
    """A frozen causal LM that drafts with Medusa heads and verifies a tree per pass."""

    def __init__(self, backbone: Backbone | PreTrainedModel, heads: MedusaHeads, tree: Tree | None = None) -> None:
        """Put the parts together.

        Raises:
            UserError: heads, tree and backbone do not fit each other, or the backbone cannot verify a tree exactly.
        """
        self.backbone = backbone if isinstance(backbone, Backbone) else Backbone.wrap(backbone)
        config = heads.config
        ours, theirs = (self.backbone.hidden_size, self.backbone.vocab_size), (config.hidden_size, config.vocab_size)
        if ours != theirs:
            raise UserError(
                f"the heads are for a backbone with hidden size {theirs[0]} and vocabulary {theirs[1]}, "
                f"{self.backbone.source or 'this one'} has {ours[0]} and {ours[1]}"
            )
        check_tree_attention(self.backbone)
        # A copy: what was passed in stays trainable and can be saved.
        self.heads = copy.deepcopy(heads).to(device=self.backbone.device, dtype=self.backbone.dtype).eval()
        self.heads.requires_grad_(False)
        if self.backbone.device.type == "cpu" and can_pack(self.backbone.dtype):
            pack_linears(self.heads)
        depth = min(config.num_heads, 3)
        self.tree = tree or Tree.from_paths([path for path in DEFAULT_PATHS if len(path) <= depth])
        self.drafter = MedusaDrafter(self.heads, self.tree)

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path,
        backbone: str | Backbone | PreTrainedModel | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> MedusaModel:
        """Load heads and, unless given, the backbone that their config names.

        Raises:
            UserError: either cannot be loaded, or the heads were trained on another backbone.
        """
        checkpoint = load_heads(heads)
        if backbone is None and not checkpoint.backbone_source:
            raise UserError(f"{heads} does not name its backbone; pass backbone=...")
        if backbone is None or isinstance(backbone, str):
            backbone = load_backbone(backbone or checkpoint.backbone_source, dtype, device)
        elif isinstance(backbone, PreTrainedModel):
            backbone = Backbone.wrap(backbone)
        model = cls(backbone, checkpoint.heads, checkpoint.tree)
        model.backbone.check_probe(checkpoint.probe, str(heads))
        return model

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 256,
        verifier: VerifierName | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_steps: int | None = None,
        drafter: Drafter | None = None,
    ) -> Generation:
        """Generate after one prompt.

        Args:
            input_ids: ``(T,)`` or ``(1, T)`` token ids.
            verifier: ``greedy`` or ``rejection``; by default what the temperature asks for.
            temperature: 0 for greedy decoding.
            eos_token_ids: ids that end the text; the backbone's own by default.
            drafter: another drafter than the heads; `NoDrafter()` is plain decoding.

        Raises:
            UserError: more than one row, or settings that contradict each other.
        """
        stats, blocks = DecodeStats(), []
        stream = self.stream(
            input_ids, max_new_tokens, verifier, temperature, top_k, top_p, generator, eos_token_ids, max_steps,
            drafter, stats,
        )  # fmt: skip
        blocks = list(stream)
        new = torch.tensor([token for block in blocks for token in block.tokens], dtype=torch.long)
        sequences = torch.cat([input_ids.view(-1), new.to(input_ids.device)])[None]
        return Generation(sequences, (blocks[-1].finish_reason if blocks else None) or "length", stats)

    def stream(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 256,
        verifier: VerifierName | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_steps: int | None = None,
        drafter: Drafter | None = None,
        stats: DecodeStats | None = None,
    ) -> Iterator[Block]:
        """The same as `generate`, a block of tokens at a time."""
        if input_ids.dim() == 2 and input_ids.shape[0] != 1:
            raise UserError(f"generate takes one prompt at a time, got a batch of {input_ids.shape[0]}")
        return decode(
            self.backbone,
            drafter or self.drafter,
            make_verifier(verifier, temperature, top_k, top_p, generator),
            input_ids.view(-1).to(self.backbone.device),
            max_new_tokens,
            self.backbone.eos_token_ids if eos_token_ids is None else eos_token_ids,
            DecodeStats() if stats is None else stats,
            max_steps,
        )


def make_verifier(
    name: VerifierName | None, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> Verify:
    """The verifier that the settings ask for.

    Raises:
        UserError: ``greedy`` with a temperature, or ``rejection`` without one.
    """
    name = name or ("rejection" if temperature > 0 else "greedy")
    if name == "greedy":
        if temperature > 0:
            raise UserError(f"verifier greedy takes temperature 0, got {temperature}; use verifier rejection to sample")
        return verify_greedy
    if temperature <= 0:
        raise UserError("verifier rejection samples and needs temperature > 0; use verifier greedy for temperature 0")
    return partial(verify_rejection, sampling=Sampling(temperature, top_k, top_p), generator=generator)
