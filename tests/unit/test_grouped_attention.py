"""Grouped attention gives what transformers' own gives, and is used where it should be."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from conftest import make_llama
from medusa_train.inference import grouped_attention as module
from medusa_train.inference.backbone import Backbone


class Layer(nn.Module):
    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["bool", "additive", "none"])
def test_equals_transformers_attention(groups, nodes, rows, kind):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 2 * groups, nodes, 8, generator=generator)
    key, value = torch.randn(2, rows, 2, 12, 8, generator=generator).unbind()
    allowed = torch.rand(rows, 1, nodes, 12, generator=generator) < 0.6
    allowed[..., 0] = True
    mask = {"bool": allowed, "additive": torch.zeros(allowed.shape).masked_fill(~allowed, -1e9), "none": None}[kind]
    ours, _ = module.grouped_attention(Layer(groups), query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(Layer(groups), query, key, value, mask, scaling=0.3)
    assert ours.shape == (rows, nodes, 2 * groups, 8)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("lengths", [[300, 900, 30, 40], [900, 900, 10, 880]])
def test_rows_of_different_lengths_attend_apart(groups, lengths, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 2 * groups, 5, 8, generator=generator)
    key, value = torch.randn(2, 4, 2, 900, 8, generator=generator).unbind()
    allowed = torch.rand(4, 1, 5, 900, generator=generator) < 0.6
    allowed &= torch.arange(900) < torch.tensor(lengths)[:, None, None, None]
    allowed[..., 0] = True
    seen = []
    attend = module._attend
    monkeypatch.setattr(module, "_attend", lambda *given: (seen.append(given[2].shape), attend(*given))[1])
    ours, _ = module.grouped_attention(Layer(groups), query, key, value, allowed, scaling=0.3)
    theirs, _ = sdpa_attention_forward(Layer(groups), query, key, value, allowed, scaling=0.3)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert sum(rows * columns for rows, _, columns, _ in seen) < 2700, "nobody reads all 3,600"


def test_a_wrapped_model_uses_it_for_trees_and_still_generates(monkeypatch):
    model, used = make_llama(), []
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([[4, 5]]), **options)
    backbone = Backbone.wrap(model)
    assert model.config._attn_implementation == module.NAME
    assert torch.equal(
        model.generate(torch.tensor([[4, 5]]), max_new_tokens=10, do_sample=False, eos_token_id=None), expected
    )
    monkeypatch.setattr(module, "sdpa_attention_forward", lambda *arguments, **keywords: used.append(1))
    mask = torch.tril(torch.ones(3, 3)).bool()[None, None]
    backbone.hidden_states(torch.tensor([[4, 5, 6]]), attention_mask=mask, position_ids=torch.arange(3)[None])
    backbone.hidden_states(torch.tensor([[4]]), attention_mask=mask[..., :1, :1], position_ids=torch.zeros(1, 1).long())
    assert not used, "nor for a pass of one token"


def test_eager_models_stay_eager():
    model = make_llama(attn_implementation="eager")
    model.set_attn_implementation("eager")
    Backbone.wrap(model)
    assert model.config._attn_implementation == "eager"
