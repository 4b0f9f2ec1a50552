"""Linear layers whose weights are laid out once for a CPU's matrix kernels.

A verification pass multiplies a handful of tokens with every weight of the model. `torch.nn.Linear` hands such
narrow products to kernels that copy the weight into their own layout at each call; for 4 to 16 tokens that copy
costs more than the product. oneDNN can keep the weight in its layout instead, which is what inductor's freezing does
inside a compiled graph; here it is done for eager code. Plain decoding on the same model gets the same benefit, so
speedups stay honest. ``benchmarks/cpu_linear.py`` measures the difference.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

# oneDNN picks the layout for an expected number of rows; one made for 8 is within noise of the best from 1 to 128.
EXPECTED_ROWS = 8


class PackedLinear(nn.Module):
    """A frozen ``nn.Linear`` in oneDNN's weight layout (inference only, ``(..., in)`` -> ``(..., out)``)."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), EXPECTED_ROWS)
        self.packed = packed  # a plain attribute: an opaque tensor cannot be moved, cast or saved with the module
        self.bias = None if linear.bias is None else linear.bias.detach()

    @property
    def weight(self) -> Tensor:
        """The weight as an ordinary ``(out, in)`` tensor: a copy."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return cast(Tensor, product)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's packed product for ``dtype`` on this CPU."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        layer = nn.Linear(8, 8, dtype=dtype)
        with torch.inference_mode():
            PackedLinear(layer)(torch.zeros(1, 8, dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
    return True


def pack_linears(model: nn.Module) -> int:
    """Replace every ``nn.Linear`` of a frozen CPU model in place; returns how many were replaced.

    The model can no longer be trained, moved to another device or saved. Subclasses of ``nn.Linear`` (quantized or
    adapted layers) are left alone, since their forward pass is not a plain product.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced
