"""Which tokens fill a tree, of either kind of heads, against reading every node's path alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_llama, random_heads
from medusa_train.data.hidden_states import Shard
from medusa_train.eval.acceptance import replay, token_ranks
from medusa_train.eval.tree_search import MISS, best_tree, count_prefixes, expected_tokens
from medusa_train.inference import Backbone, HeadsConfig, MedusaHeads, MedusaModel, Tree, UserError
from medusa_train.inference.candidates import TreeFiller
from medusa_train.inference.checkpoint import load_heads

TABLE = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * 7
KINDS = pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
READERS = pytest.mark.parametrize("kind", ["hydra", "recurrent"])
RANK_PATHS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=12)


def embed(ids):
    return TABLE[ids]


@KINDS
@settings(deadline=None, max_examples=25)
@given(paths=RANK_PATHS, seed=st.integers(0, 99))
def test_every_node_holds_the_token_of_its_rank_after_its_own_path(kind, paths, seed):
    heads, tree = random_heads(seed=seed, kind=kind), Tree.from_paths(paths)
    hidden, roots, temperatures = torch.randn(2, 32), torch.tensor([3, 60]), (1.0, 0.6, 1.7)
    filler = TreeFiller(heads, tree, embed)
    tokens, chances = filler.tokens_and_chances(hidden, roots, temperatures)
    assert torch.equal(tokens, filler.tokens(hidden, roots))
    for row in range(2):
        for node, path in enumerate(tree.paths):
            line, chance = [int(roots[row])], 1.0
            for head, rank in enumerate(path):
                logits = heads(hidden[row], head, embed(torch.tensor(line)))
                best = (logits / temperatures[head]).softmax(-1).sort(descending=True, stable=True)
                line.append(int(best.indices[rank]))
                chance *= float(best.values[rank])
            assert int(tokens[row, node]) == line[-1]
            assert float(chances[row, node]) == pytest.approx(chance, rel=1e-4, abs=1e-9)


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
    before = embed(torch.randint(0, 64, (5, 3)))
    state = hidden
    for head in range(3):
        token = before[:, head] / before[:, head].square().mean(-1, keepdim=True).sqrt()
        for layer, read in ((first, lambda x, token=token: torch.cat([x, token], -1)), (second, lambda x: x)):
            pre = torch.nn.functional.linear(read(state), layer.linear.weight, layer.linear.bias)
            state = state + pre * pre.sigmoid()
        expected = state @ projection.weight.T
        assert torch.allclose(heads(hidden, head, before[:, : head + 1]), expected, atol=1e-4)


@READERS
@pytest.mark.parametrize("draft_vocabulary", [0, 24])
def test_heads_that_read_tokens_start_as_the_backbone_and_survive_saving(tmp_path, kind, draft_vocabulary):
    backbone = Backbone.wrap(make_llama())
    config = HeadsConfig(3, 2, 32, 64, draft_vocabulary, kind)
    ids = torch.arange(5, 5 + draft_vocabulary) if draft_vocabulary else None
    heads = MedusaHeads.for_backbone(backbone, config, ids)
    hidden = torch.randn(4, 32)
    before = backbone.embed(torch.randint(0, 64, (4, 3)))
    for head in range(3):
        own = backbone.logits(hidden)[:, heads.draft_token_ids]
        assert torch.allclose(heads(hidden, head, before[:, : head + 1]), own, atol=1e-6)
    widths = [head[0].linear.in_features for head in heads.heads]
    assert widths == ([64, 96, 128] if kind == "hydra" else [64])
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    heads.save_pretrained(tmp_path)
    again = load_heads(tmp_path).heads
    assert again.config == config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in heads.state_dict().items())


@READERS
def test_heads_that_read_tokens_are_refused_without_a_layer_or_with_narrow_embeddings(kind):
    with pytest.raises(UserError, match=f"num_layers must be at least 1 for {kind}"):
        HeadsConfig(3, 0, 32, 64, kind=kind)
    backbone = Backbone.wrap(make_llama())
    backbone.model.set_input_embeddings(torch.nn.Embedding(64, 16))
    with pytest.raises(UserError, match=r"as wide as the hidden states \(32\), this backbone has 16"):
        MedusaHeads.for_backbone(backbone, HeadsConfig(3, 1, 32, 64, kind=kind))


def test_a_folder_of_another_kind_is_named(tmp_path):
    random_heads().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "medusa"', '"model_type": "hydra"'))
    with pytest.raises(UserError, match=r"0\.0\.linear\.weight has shape \(32, 32\), expected \(32, 64\)"):
        load_heads(tmp_path)
    config.write_text(config.read_text().replace('"model_type": "hydra"', '"model_type": "llama"'))
    with pytest.raises(UserError, match="model_type 'llama'; heads are medusa, hydra, recurrent"):
        load_heads(tmp_path)


@KINDS
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
    shard = Shard(states, answer, torch.full((60,), 60))
    model = MedusaModel(llama, heads)
    ranks = token_ranks(model, [shard])
    for t in range(60):
        for head in range(3):
            if t + head + 1 >= 60:
                assert ranks.ranks[t, head] == MISS
                continue
            logits = model.heads(states[t], head, backbone.embed(answer[t : t + head + 1]))
            assert int(ranks.ranks[t, head]) == int((logits > logits[answer[t + head + 1]]).sum())
    prefixes = count_prefixes(ranks.calibration(), 32)
    tree = best_tree(prefixes, 24)
    out = MedusaModel(llama, heads, tree).generate(prompt, 60, eos_token_ids=())
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert dict(out.stats.histogram) == dict(replay(ranks, tree).histogram)
    assert expected_tokens(prefixes, tree) > 1.2  # so that the comparison saw accepted drafts
