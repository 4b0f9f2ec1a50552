"""One pass of a backbone over a tree per row, as the model's own code runs it or compiled to one graph per shape.

Compiled shapes are few: N tokens of B rows, before them a committed part whose visible length is a power of two
(`TreeCache`), so that a long text crosses a handful of graphs. On a CPU, inductor fuses everything between the matrix
products; those stay calls of the packed layers (`cpu_linear`), which is what its freezing would make of them, without
a copy of the weights for every graph. Inductor keeps compiled code on disk (``TORCHINDUCTOR_CACHE_DIR``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from medusa_train.inference.attention import Masks, new_cache, pass_inputs
from medusa_train.inference.backbone import Backbone, cache_keyword
from medusa_train.inference.errors import UserError
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.tree import Tree

SMALLEST_BUCKET = 128  # committed columns that the smallest graph sees
MOST_GRAPHS = 256  # dynamo's own limit of 8 per function would silently go back to eager code


class Step:
    """Passes of one backbone and the caches that they need.

    Attributes:
        backbone: whose passes these are.
        compiled: whether they are compiled; a note on standard error says when a new shape is.
    """

    def __init__(self, backbone: Backbone, compiled: bool = False) -> None:
        """Prepare passes; nothing is compiled before the first.

        Raises:
            UserError: ``compiled`` on a CPU without a C++ compiler.
        """
        self.backbone, self.compiled = backbone, compiled
        decoder = backbone.decoder
        keyword = cache_keyword(type(decoder).forward)

        def run(tokens: Tensor, positions: Tensor, masks: Masks, cache: TreeCache) -> tuple[Tensor, Tensor]:
            hidden: Tensor = decoder(
                input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=True, **{keyword: cache}
            )[0]
            return hidden, backbone.logits(hidden)

        if compiled and backbone.device.type == "cpu":
            _check_compiler()
        self._run = torch.compile(run, dynamic=False, options={"guard_filter_fn": _shapes}) if compiled else run
        self._seen: set[tuple[int, ...]] = set()

    def new_cache(self, scratch: int, capacity: int) -> TreeCache:
        """An empty cache for passes of at most ``scratch`` tokens and ``capacity`` committed positions a row.

        Compiled code depends on how much room there is, so that it begins small there and grows by powers of two.
        """
        if self.compiled:
            return new_cache(self.backbone, scratch, SMALLEST_BUCKET, SMALLEST_BUCKET)
        return new_cache(self.backbone, scratch, capacity)

    def __call__(self, tokens: Tensor, trees: Sequence[Tree], cache: TreeCache) -> tuple[Tensor, Tensor]:
        """Run a pass.

        Args:
            tokens: ``(B, N)`` tokens of each row's tree.
            trees: a tree for each row, all of N nodes.
            cache: holds the rows' committed text; the nodes are written to its scratch columns.

        Returns:
            Hidden states ``(B, N, hidden)`` and logits ``(B, N, V)`` of the nodes.
        """
        positions, masks = pass_inputs(self.backbone, trees, cache)
        shape = (*tokens.shape, cache.visible, cache.capacity, cache.columns.scratch)
        if self.compiled and shape not in self._seen:
            self._seen.add(shape)
            rows, nodes = tokens.shape
            note = f"compiling a step of {nodes} tokens ({rows} rows, {cache.visible} positions)…"
            tqdm.write(note, file=sys.stderr)
            with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=MOST_GRAPHS):
                return self._run(tokens, positions, masks, cache)
        return self._run(tokens, positions, masks, cache)


def _shapes(guards: Sequence[Any]) -> list[bool]:
    """Which of a graph's guards are checked before every pass: those of the shapes that `Step` varies.

    The thousands of others say that nobody changed the model since, which nobody does; asking them takes a
    millisecond of a small model's pass.
    """
    return [
        (isinstance(guard.value, Tensor) and not isinstance(guard.value, nn.Parameter))
        or guard.name.endswith((".scratch", ".visible"))
        for guard in guards
    ]


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError("compiled steps need a C++ compiler: install g++, or leave compiling off") from error
