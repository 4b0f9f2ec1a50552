"""A tree of heads with a copied phrase below one of its nodes.

The phrase hangs below the node that its first tokens already lead to, so that no token is verified twice: where heads
agree with the copy it makes their path longer, and where they do not it is a branch from the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_train.inference.tree import Tree


@dataclass(frozen=True)
class JoinedTree:
    """A tree of heads and a chain of copied tokens.

    Attributes:
        sources: for each node, its place among the nodes of the heads' tree and then those of the chain.
    """

    tree: Tree
    sources: tuple[int, ...]


def agreeing_node(tree: Tree, tokens: Sequence[int], copy: Sequence[int]) -> int:
    """The deepest node whose path from the root holds the copy's first tokens.

    Args:
        tokens: the tree's tokens, the root's first.
        copy: what may follow the root.
    """
    node = 0
    for token in copy:
        child = next((child for child in tree.children[node] if tokens[child] == token), None)
        if child is None:
            break
        node = child
    return node


def join(heads: Tree, node: int, length: int) -> JoinedTree:
    """Hang a chain of ``length`` tokens below a node."""
    line = heads.paths[node]
    spare = max((heads.paths[child][-1] + 1 for child in heads.children[node]), default=0)  # no token of the heads'
    chain = [(*line, spare, *(0,) * more) for more in range(length)]
    places = {path: place for place, path in enumerate([*heads.paths, *chain])}
    tree = Tree.from_paths([*heads.paths, *chain])
    return JoinedTree(tree, tuple(places[path] for path in tree.paths))
