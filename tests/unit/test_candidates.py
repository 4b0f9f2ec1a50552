"""Which tokens fill a tree, of either kind of heads, against reading every node's path alone."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import KINDS, make_llama, random_heads, reading
from medusa_train.data.hidden_states import Shard
from medusa_train.eval.acceptance import replay, token_ranks
from medusa_train.eval.tree_search import MISS, best_tree, count_prefixes, expected_tokens
from medusa_train.inference import Backbone, HeadsConfig, MedusaHeads, MedusaModel, Tree, UserError
from medusa_train.inference.candidates import TreeFiller
from medusa_train.inference.checkpoint import load_heads
from medusa_train.inference.copies import NO_COPY, copies_in
from medusa_train.inference.heads_config import MOST_COPIED

TABLE = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * 7
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
READERS = pytest.mark.parametrize("kind", KINDS[1:])
RANK_PATHS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=12)


def embed(ids):
    return TABLE[ids]


def normed(token):
    """What heads read of a token, by its formula."""
    return TABLE[token] / TABLE[token].square().mean(-1, keepdim=True).sqrt()


@EVERY_KIND
@settings(deadline=None, max_examples=25)
@given(paths=RANK_PATHS, seed=st.integers(0, 99))
def test_every_node_holds_the_token_of_its_rank_after_its_own_path(kind, paths, seed):
    heads, tree = random_heads(seed=seed, kind=kind), Tree.from_paths(paths)
    hidden, roots, temperatures = torch.randn(2, 32), torch.tensor([3, 60]), (1.0, 0.6, 1.7)
    filler = TreeFiller(heads, tree, embed)
    copies = torch.tensor([[-1] * 3, [-1] * 3])
    for head in range(3):  # the second row's copy is what it drafts first, so that some nodes follow it
        draft = TreeFiller(heads, Tree.chain(3), embed).tokens(hidden, roots, copies)
        copies[1, head:] = draft[1, head + 1 :]
    tokens, chances = filler.tokens_and_chances(hidden, roots, temperatures, copies)
    assert torch.equal(tokens, filler.tokens(hidden, roots, copies))
    for row in range(2):
        for node, path in enumerate(tree.paths):
            line, chance = [int(roots[row])], 1.0
            for head, rank in enumerate(path):
                copy = copies[row, : head + 1].tolist()
                blind = kind.startswith("medusa")
                read = [c if c >= 0 and (blind or line[1 : at + 1] == copy[:at]) else None for at, c in enumerate(copy)]
                copied = torch.stack([torch.zeros(32) if c is None else normed(c) for c in read])
                logits = heads(hidden[row], head, normed(torch.tensor(line)), copied)
                chances_here = (logits / temperatures[head]).softmax(-1)
                best = chances_here.sort(descending=True)
                line.append(int(tokens[row, tree.paths.index(path[: head + 1])]))
                # Of two that are equally likely, either may come first.
                assert line[-1] == int(best.indices[rank]) or float(chances_here[line[-1]]) == pytest.approx(
                    float(best.values[rank]), rel=1e-6
                )
                chance *= float(best.values[rank])
            assert int(tokens[row, node]) == line[-1]
            assert float(chances[row, node]) == pytest.approx(chance, rel=1e-4, abs=1e-9)


@EVERY_KIND
def test_no_copies_are_copies_that_nobody_has(kind):
    heads, tree = random_heads(kind=kind), Tree.from_paths([(0, 0, 0), (1, 2), (3,)])
    hidden, roots = torch.randn(2, 32), torch.tensor([3, 60])
    filler, none = TreeFiller(heads, tree, embed), torch.full((2, 3), NO_COPY)
    assert torch.equal(filler.tokens(hidden, roots), filler.tokens(hidden, roots, none))
    without, given = (filler.tokens_and_chances(hidden, roots, (1.0,) * 3, copies) for copies in (None, none))
    assert torch.equal(without[1], given[1])


def test_only_medusa_heads_ignore_the_tokens_and_none_sees_their_scale():
    hidden, tree = torch.randn(1, 32), Tree.chain(3)
    for kind, differs in (("medusa", False), ("recurrent", True), ("hydra", True)):
        heads = random_heads(kind=kind)
        drafts = {
            tuple(TreeFiller(heads, tree, embed).tokens(hidden, torch.tensor([root]))[0, 1:]) for root in range(9)
        }
        assert (len({tuple(map(int, draft)) for draft in drafts}) > 1) == differs
        once, scaled = (
            TreeFiller(heads, tree, lambda ids, by=by: by * TABLE[ids]).tokens_and_chances(
                hidden, torch.tensor([2]), (1.0,) * 3
            )[1]
            for by in (1, 1000)
        )
        assert torch.allclose(once, scaled, rtol=1e-3)


def test_a_recurrent_drafter_reads_one_token_after_the_other():
    """Against the recurrence written out."""
    heads = random_heads(kind="recurrent", num_layers=2)
    (first, second, projection), hidden = heads.heads[0], torch.randn(5, 32)
    before = normed(torch.randint(0, 64, (5, 3)))
    state = hidden
    for head in range(3):
        token = before[:, head]
        for layer, read in ((first, lambda x, token=token: torch.cat([x, token], -1)), (second, lambda x: x)):
            pre = torch.nn.functional.linear(read(state), layer.linear.weight, layer.linear.bias)
            state = state + pre * pre.sigmoid()
        expected = state @ projection.weight.T
        assert torch.allclose(heads(hidden, head, before[:, : head + 1]), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["medusa copies", "hydra copies"])
def test_a_head_reads_the_copy_of_what_it_predicts(kind):
    """Against the formula; the copies of tokens before are read by no head of its own depth."""
    heads, hidden = random_heads(kind=kind), torch.randn(5, 32)
    before, copied = normed(torch.randint(0, 64, (2, 5, 3)))
    for head in range(3):
        (block, projection), read = heads.heads[head], [copied[:, head]]
        if kind == "hydra copies":
            read = [*before[:, : head + 1].unbind(1), *read]
        pre = torch.cat([hidden, *read], -1) @ block.linear.weight.T + block.linear.bias
        expected = (hidden + pre * pre.sigmoid()) @ projection.weight.T
        assert torch.allclose(heads(hidden, head, before[:, : head + 1], copied[:, : head + 1]), expected, atol=1e-4)


@READERS
@pytest.mark.parametrize("draft_vocabulary", [0, 24])
def test_heads_that_read_tokens_start_as_the_backbone_and_survive_saving(tmp_path, kind, draft_vocabulary):
    backbone = Backbone.wrap(make_llama())
    config = HeadsConfig(3, 2, 32, 64, draft_vocabulary, **reading(kind))
    ids = torch.arange(5, 5 + draft_vocabulary) if draft_vocabulary else None
    heads = MedusaHeads.for_backbone(backbone, config, ids)
    hidden = torch.randn(4, 32)
    before, copied = backbone.embed(torch.randint(0, 64, (2, 4, 3)))
    for head in range(3):
        own = backbone.logits(hidden)[:, heads.draft_token_ids]
        assert torch.allclose(heads(hidden, head, before[:, : head + 1], copied[:, : head + 1]), own, atol=1e-6)
    widths = [head[0].linear.in_features for head in heads.heads]
    copies = 32 if "copies" in kind else 0
    assert widths == [
        copies + width for width in {"medusa": [32] * 3, "hydra": [64, 96, 128], "recurrent": [64]}[kind.split()[0]]
    ]
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    heads.save_pretrained(tmp_path)
    again = load_heads(tmp_path).heads
    assert again.config == config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in heads.state_dict().items())


@READERS
def test_heads_that_read_tokens_are_refused_without_a_layer_or_with_narrow_embeddings(kind):
    named = "heads that read copies" if kind == "medusa copies" else f"{kind.split()[0]} heads"
    with pytest.raises(UserError, match=f"num_layers must be at least 1 for {named}"):
        HeadsConfig(3, 0, 32, 64, **reading(kind))
    backbone = Backbone.wrap(make_llama())
    backbone.model.set_input_embeddings(torch.nn.Embedding(64, 16))
    with pytest.raises(
        UserError, match=named + r" need embeddings as wide as the hidden states \(32\), this .* has 16"
    ):
        MedusaHeads.for_backbone(backbone, HeadsConfig(3, 1, 32, 64, **reading(kind)))


def test_more_heads_than_a_copy_has_tokens_are_refused():
    HeadsConfig(MOST_COPIED, 1, 32, 64, reads_copies=True)
    with pytest.raises(UserError, match=r"heads.num_heads=6: copies are 5 tokens long; .* heads.reads_copies: false"):
        HeadsConfig(MOST_COPIED + 1, 1, 32, 64, reads_copies=True)


def test_a_folder_of_another_kind_is_named(tmp_path):
    random_heads().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "medusa"', '"model_type": "hydra"'))
    with pytest.raises(UserError, match=r"0\.0\.linear\.weight has shape \(32, 32\), expected \(32, 64\)"):
        load_heads(tmp_path)
    config.write_text(config.read_text().replace('"model_type": "hydra"', '"model_type": "llama"'))
    with pytest.raises(UserError, match="model_type 'llama'; heads are medusa, hydra, recurrent"):
        load_heads(tmp_path)


@EVERY_KIND
def test_ranks_are_counted_after_the_true_tokens_and_replay_equals_decoding(kind):
    """Ranks of the model's own greedy text, by brute force; walking them gives the very steps that decoding takes."""
    llama = make_llama(vocab_size=32)
    backbone = Backbone.wrap(llama)
    heads = random_heads(vocab_size=32, kind=kind)
    prompt = torch.tensor([1, 7, 3])
    plain = MedusaModel(llama, heads, Tree.root_only()).generate(prompt, 60, eos_token_ids=())
    text = plain.sequences[0]
    hidden = backbone.hidden_states(text[None])[0].detach()
    states, answer = hidden[len(prompt) - 1 : -1], text[len(prompt) :]
    copies = copies_in(text.tolist(), len(prompt), len(text))
    shard = Shard(states, answer, torch.full((60,), 60), copies)
    model = MedusaModel(llama, heads)
    ranks = token_ranks(model, [shard])
    for t in range(60):
        for head in range(3):
            if t + head + 1 >= 60:
                assert ranks.ranks[t, head] == MISS
                continue
            logits = model.draft_logits(states[None, t], head, answer[None, t : t + head + 1], copies[None, t])[0]
            assert int(ranks.ranks[t, head]) == int((logits > logits[answer[t + head + 1]]).sum())
    prefixes = count_prefixes(ranks.calibration(), 32)
    tree = best_tree(prefixes, 24)
    out = MedusaModel(llama, heads, tree).generate(prompt, 60, eos_token_ids=())
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert dict(out.stats.histogram) == dict(replay(ranks, tree).histogram)
    assert expected_tokens(prefixes, tree) > 1.2  # so that the comparison saw accepted drafts


@READERS
def test_rows_of_a_batch_accept_what_each_accepts_alone(kind):
    """Rows of their own lengths that end at their own times, and copies that each finds in its own text."""
    llama = make_llama(vocab_size=32)
    torch.manual_seed(4)
    heads = MedusaHeads.for_backbone(Backbone.wrap(llama), HeadsConfig(3, 1, 32, 32, **reading(kind)))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = MedusaModel(llama, heads, Tree.from_paths([[0, 0, 0], [1], [2, 0], [0, 1]]))
    rows = [torch.tensor(text) for text in ([1, 2, 3, 1, 2], [7], [4, 5, 6, 4, 5, 6, 4, 5], [9, 9, 9, 8])]
    for ends in ((), (3, 11)):
        alone = [model.generate(row, 30, eos_token_ids=ends) for row in rows]
        together = model.generate(rows, 30, eos_token_ids=ends)
        assert together.new_tokens == [out.new_tokens[0] for out in alone]
        assert together.stats.histogram == sum((out.stats.histogram for out in alone), Counter())
    assert together.stats.tokens_per_step > 1.02
