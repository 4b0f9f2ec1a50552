"""Trees: closure under prefixes, ancestry, serialisation."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.inference import Tree, UserError

paths = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=12)


@given(paths)
def test_every_node_has_its_parent_before_it(given_paths):
    tree = Tree.from_paths(given_paths)
    assert tree.paths[0] == ()
    assert tree.parents[0] == -1
    for node, (path, parent) in enumerate(zip(tree.paths, tree.parents, strict=True)):
        if path:
            assert parent < node
            assert tree.paths[parent] == path[:-1]
    assert set(given_paths) <= set(tree.paths)


@given(paths, st.randoms())
def test_order_duplicates_and_leaf_only_paths_do_not_matter(given_paths, random):
    tree = Tree.from_paths(given_paths)
    shuffled = list(given_paths) * 2
    random.shuffle(shuffled)
    leaves = [path for node, path in enumerate(tree.paths) if path and not tree.children[node]]
    assert Tree.from_paths(shuffled) == tree == Tree.from_paths(leaves)


@given(paths)
def test_mask_is_ancestry(given_paths):
    tree = Tree.from_paths(given_paths)
    expected = [[below[: len(above)] == above for above in tree.paths] for below in tree.paths]
    assert tree.ancestor_mask.tolist() == expected
    assert tree.depths.tolist() == [len(path) for path in tree.paths]


def test_equal_ranks_under_different_parents_do_not_see_each_other():
    tree = Tree.from_paths([(0, 1), (1, 1)])
    first, second = tree.paths.index((0, 1)), tree.paths.index((1, 1))
    assert not tree.ancestor_mask[first, second]
    assert not tree.ancestor_mask[second, first]


@given(paths)
def test_round_trip(tmp_path_factory, given_paths):
    tree = Tree.from_paths(given_paths)
    path = tmp_path_factory.mktemp("tree") / "tree.json"
    tree.save(path)
    assert Tree.load(path) == tree


def test_ranks_needed_per_depth():
    assert Tree.from_paths([(0,), (4, 2), (1, 7)]).ranks_needed() == [5, 8]
    assert Tree.root_only().ranks_needed() == []


def test_a_rank_as_large_as_the_vocabulary_is_refused():
    tree = Tree.from_paths([(12,)])
    tree.check(num_heads=1, vocab_size=13)
    with pytest.raises(UserError, match="rank 12 at depth 1"):
        tree.check(num_heads=1, vocab_size=12)


def test_a_tree_deeper_than_the_heads_is_refused():
    with pytest.raises(UserError, match="3 deep, but there are 2 heads"):
        Tree.chain(3).check(num_heads=2, vocab_size=9)


@pytest.mark.parametrize("bad", [[(-1,)], [(0.5,)], [("0",)]])
def test_ranks_are_whole_numbers_from_zero(bad):
    with pytest.raises(UserError, match="whole numbers"):
        Tree.from_paths(bad)


@pytest.mark.parametrize("content", ["", "[]", '{"paths": 3}', '{"nodes": []}'])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"tree\.json"):
        Tree.load(path)


def test_chain_and_file_format(tmp_path):
    Tree.chain(2).save(tmp_path / "tree.json")
    assert json.loads((tmp_path / "tree.json").read_text()) == {"paths": [[0], [0, 0]]}
    assert torch.equal(Tree.chain(2).ancestor_mask, torch.ones(3, 3).tril().bool())


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ("[[true]]", "must hold whole numbers"),
        ("[[-1]]", "must hold whole numbers"),
        ("[[" + "0," * 70 + "0]]", "levels"),
    ],
)
def test_a_wrong_tree_file_is_named(tmp_path, paths, told):
    path = tmp_path / "tree.json"
    path.write_text(f'{{"paths": {paths}}}')
    with pytest.raises(UserError, match=rf"tree\.json: tree: .*{told}"):
        Tree.load(path)
