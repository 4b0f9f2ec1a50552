"""One pass of a backbone over a tree per row, as the model's own code runs it or compiled to one graph per shape.

Compiled shapes are few: N tokens of B rows, before them a committed part whose visible length is a power of two
(`TreeCache`), so that a long text crosses a handful of graphs. On a CPU, inductor fuses everything between the matrix
products; those stay calls of the packed layers (`cpu_linear`), which is what its freezing would make of them, without
a copy of the weights for every graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from medusa_train.inference.attention import Masks, new_cache, pass_inputs
from medusa_train.inference.backbone import Backbone, cache_keyword
from medusa_train.inference.graphs import Graphs
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.tree import Tree

SMALLEST_BUCKET = 128  # committed columns that the smallest graph sees
SCRATCH = 16  # compiled passes have room for a multiple of so many nodes, so that drafters share their graphs


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

        self._run = run
        self._graphs = Graphs(run, backbone.device) if compiled else None

    def new_cache(self, scratch: int, capacity: int) -> TreeCache:
        """An empty cache for passes of at most ``scratch`` tokens and ``capacity`` committed positions a row.

        Compiled code depends on how much room there is, so that it begins small there and grows by powers of two.
        """
        if self.compiled:
            return new_cache(self.backbone, -(-scratch // SCRATCH) * SCRATCH, SMALLEST_BUCKET, SMALLEST_BUCKET)
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
        if self._graphs is None:
            return self._run(tokens, positions, masks, cache)
        rows, nodes = tokens.shape
        shape = (rows, nodes, cache.visible, cache.capacity, cache.columns.scratch)
        what = f"a step of {nodes} tokens ({rows} rows, {cache.visible} positions)"
        return self._graphs(shape, what, tokens, positions, masks, cache)
