"""Linear layers whose weights are laid out once for a CPU's matrix kernels.

A verification pass multiplies a handful of tokens with every weight of the model. `torch.nn.Linear` hands such
narrow products to kernels that copy the weight into their own layout at each call; for 4 to 16 tokens that copy
costs more than the product. oneDNN can keep the weight in its layout instead, which is what inductor's freezing does
inside a compiled graph; here it is done for eager code. Plain decoding on the same model gets the same benefit, so
speedups stay honest. Layers that read the very same tensor (queries, keys and values; the two halves of a gated MLP)
become one product, because a small product costs its call. ``benchmarks/cpu_linear.py`` measures both.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
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
_product = torch.ops.mkldnn._linear_pointwise.default  # chosen once: a pass calls a hundred
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
        return cast(Tensor, _product(x, self.packed, self.bias, "none", [], ""))


class JointLinear(nn.Module):
    """One of several frozen ``nn.Linear`` that read the same tensor: the first that is asked computes all of them."""

    def __init__(self, joint: Joint, place: int) -> None:
        super().__init__()
        self.joint, self.product, self.place = joint, joint.product, place
        self.in_features, self.out_features = joint.product.in_features, joint.sizes[place]

    @property
    def weight(self) -> Tensor:
        """The weight as an ordinary ``(out, in)`` tensor: a copy."""
        return cast(Tensor, self.product.weight.split(self.joint.sizes)[self.place])

    @property
    def bias(self) -> Tensor | None:
        bias = self.product.bias
        return None if bias is None else cast(Tensor, bias.split(self.joint.sizes)[self.place])

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(x, self.place)


class Joint:
    """The product of layers that read the same tensor.

    Attributes:
        product: of all of them.
        sizes: how many of its columns are each layer's.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        whole = nn.Linear(layers[0].in_features, sum(self.sizes), bias=False, device="meta")
        whole.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
        if layers[0].bias is not None:
            whole.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
        self.product = PackedLinear(whole)
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def __call__(self, x: Tensor, place: int) -> Tensor:
        last = self._last  # read once: another thread may decode with the same model
        if last is None or last[0] is not x:
            last = self._last = (x, self.product(x).split(self.sizes, dim=-1))
        if place == len(self.sizes) - 1:
            self._last = None  # nothing is held, and no compiled graph gives it out
        return last[1][place]


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


def pack_linears(model: nn.Module, run: Callable[[], object] | None = None) -> int:
    """Replace every ``nn.Linear`` of a frozen CPU model in place; returns how many were replaced.

    The model can no longer be trained, moved to another device or saved. Subclasses of ``nn.Linear`` (quantized or
    adapted layers) are left alone, since their forward pass is not a plain product.

    Args:
        run: a pass of the model, to see which layers read the same tensor; None: none is joined.
    """
    replacement: dict[nn.Module, nn.Module] = {}
    for layers in same_inputs(model, run) if run else []:
        joint = Joint(layers)
        replacement |= {layer: JointLinear(joint, place) for place, layer in enumerate(layers)}
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, replacement.get(child) or PackedLinear(child))
                replaced += 1
    return replaced


@torch.no_grad()  # not inference mode, in which tensors do not count their changes
def same_inputs(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Plain linear layers that a pass calls once each, with the very same unchanged tensor, in the order of calls."""
    calls: list[tuple[nn.Linear, Tensor, int]] = []  # the tensors are held, so that no two have the same id

    def note(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if arguments:  # given by its place, as everywhere
            calls.append((cast(nn.Linear, layer), arguments[0], arguments[0]._version))

    hooks = [layer.register_forward_pre_hook(note) for layer in model.modules() if type(layer) is nn.Linear]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    called = Counter(layer for layer, *_ in calls)
    groups: dict[tuple[int, int, bool], list[nn.Linear]] = {}
    for layer, x, version in calls:
        if called[layer] == 1:
            groups.setdefault((id(x), version, layer.bias is None), []).append(layer)
    return [layers for layers in groups.values() if len(layers) > 1]
