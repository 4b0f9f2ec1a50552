"""Linear layers whose weights are laid out once for a CPU's matrix kernels.

A verification pass multiplies a handful of tokens with every weight of the model. `torch.nn.Linear` hands such
narrow products to kernels that copy the weight into their own layout at each call; for 4 to 16 tokens that copy
costs more than the product. oneDNN can keep the weight in its layout instead, which is what inductor's freezing does
inside a compiled graph; here it is done for eager code. Plain decoding on the same model gets the same benefit, so
speedups stay honest. ``benchmarks/cpu_linear.py`` measures the difference.
"""

from __future__ import annotations

import itertools
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

# oneDNN picks the layout for an expected number of rows; one made for 8 is within noise of the best from 1 to 128.
EXPECTED_ROWS = 8


# A compiled graph cannot take an opaque weight as an input, so it names the layer and this finds it.
_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_library = torch.library.Library("medusa_train", "DEF")
_numbers = itertools.count()
_library.define("packed_linear(Tensor x, int layer, int out_features) -> Tensor")


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
        self.number = next(_numbers)
        _layers[self.number] = self

    @property
    def weight(self) -> Tensor:
        """The weight as an ordinary ``(out, in)`` tensor: a copy."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return cast(Tensor, torch.ops.medusa_train.packed_linear(x, self.number, self.out_features))
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return cast(Tensor, product)


def _packed_linear(x: Tensor, layer: int, out_features: int) -> Tensor:
    return _layers[layer].product(x)


def _packed_linear_shape(x: Tensor, layer: int, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("medusa_train::packed_linear", _packed_linear_shape, lib=_library)


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
