"""Training with the backbone in the loop: hidden states are computed for every step and never stored.

For training that is longer than a disk, or than one epoch is worth caching. The loss, the Trainer and the heads are
those of cached training; only where the hidden states come from differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.data.hidden_states import CACHE_DTYPE
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.heads import MedusaHeads
from medusa_train.losses import LossWeights
from medusa_train.trainer import HeadsForTraining


class OnlineHeads(HeadsForTraining):
    """Heads behind their frozen backbone; takes packs of token ids (`PackedRows`) in place of hidden states.

    The backbone is no submodule: it is not wrapped, saved or trained, and every process holds all of it.
    """

    def __init__(self, heads: MedusaHeads, backbone: Backbone, weights: LossWeights) -> None:
        super().__init__(heads, backbone, weights)
        self.backbone = backbone

    def samples(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A sample for every place of the packs.

        Args:
            batch: ``input_ids``, ``position_ids``, ``roots`` ``(N, L)``, ``labels`` ``(N, L, K)`` and ``copies``
                ``(N, L, MOST_COPIED)``.

        Returns:
            ``hidden`` ``(N*L, hidden)``, ``roots`` ``(N*L,)``, ``teacher_hidden`` ``(N*L, K, hidden)``, ``labels``
            ``(N*L, K)``, ``copies`` ``(N*L, MOST_COPIED)``.
        """
        with torch.no_grad():
            # Rounded as the cache rounds them, so that both ways of training are one.
            hidden = self.states(batch).to(CACHE_DTYPE).to(self.teacher_projection.dtype)
        return packed_samples(batch, hidden, hidden)

    def states(self, batch: dict[str, Tensor]) -> Tensor:
        """The backbone's last hidden states at every place of the packs, in its own dtype: ``(N*L, hidden)``."""
        with torch.autocast(batch["input_ids"].device.type, enabled=False):
            return self.backbone.hidden_states(batch["input_ids"], position_ids=batch["position_ids"]).flatten(0, 1)


def packed_samples(batch: dict[str, Tensor], hidden: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """The samples of `OnlineHeads.samples` from states ``(N*L, hidden)``: those heads read, and those they imitate."""
    labels = batch["labels"].flatten(0, 1)
    return {
        "hidden": hidden,
        "roots": batch["roots"].flatten(),
        "teacher_hidden": states_ahead(teacher, labels.shape[1]),
        "labels": labels,
        "copies": batch["copies"].flatten(0, 1),
    }


def states_ahead(hidden: Tensor, num_heads: int) -> Tensor:
    """The ``num_heads`` states after each one, zeros past the last: ``(T, hidden)`` -> ``(T, K, hidden)``, no copy."""
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, num_heads))
    return padded.unfold(0, num_heads + 1, 1).transpose(1, 2)[:, 1:]
