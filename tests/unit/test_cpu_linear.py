"""Packed linear layers give the products of plain ones, and a packed model decodes the same tokens."""

import pytest
import torch
from torch import nn

from conftest import make_llama, random_heads
from medusa_train.eval.cost import bytes_read
from medusa_train.inference import MedusaModel, NoDrafter, Tree
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.cpu_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this build of torch has no packed product")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (2, 5, 48), (300, 48)])
def test_products_equal(shape, bias):
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias)
    packed = PackedLinear(plain)
    x = torch.randn(shape)
    with torch.inference_mode():
        assert torch.allclose(packed(x), plain(x), atol=1e-5)
    assert torch.equal(packed.weight, plain.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_is_read_like_a_plain_one(dtype):
    if not can_pack(dtype):
        pytest.skip("this processor does not pack this dtype")
    layers = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 16, bias=False)).to(dtype).requires_grad_(False)
    expected = bytes_read(layers)
    assert pack_linears(layers) == 2
    assert bytes_read(layers) == expected == (48 * 80 + 80 + 80 * 16) * dtype.itemsize


def test_only_plain_linear_layers_are_replaced():
    class Adapted(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Adapted(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Embedding(4, 8))
    assert pack_linears(model.requires_grad_(False)) == 2
    assert type(model[1]) is Adapted


def test_a_packed_backbone_decodes_the_same_tokens_and_still_gives_its_projection():
    plain, packed = make_llama(tie_word_embeddings=True), make_llama(tie_word_embeddings=True)
    assert pack_linears(packed) == 2 * 7 + 1
    backbone = Backbone.wrap(packed)
    assert torch.equal(backbone.projection_rows(torch.tensor([3, 9])), plain.lm_head.weight[[3, 9]])
    prompt = torch.tensor([5, 6, 7])
    expected = plain.generate(prompt[None], max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None)
    for drafter in (NoDrafter(), None):
        model = MedusaModel(backbone, random_heads(), Tree.from_paths([(0, 0), (1,)]))
        out = model.generate(prompt, 40, eos_token_ids=(), drafter=drafter)
        assert torch.equal(out.sequences, expected)
