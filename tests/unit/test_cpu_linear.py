"""Packed linear layers give the products of plain ones, and a packed model decodes the same tokens."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from conftest import make_llama, random_heads
from medusa_train.eval.cost import bytes_read
from medusa_train.inference import MedusaModel, NoDrafter, Tree
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.cpu_linear import JointLinear, PackedLinear, can_pack, pack_linears, same_inputs

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


class Sharing(nn.Module):
    """Layers with the same input, with a changed one, with another, and one that is called twice."""

    def __init__(self, bias=False):
        super().__init__()
        self.a, self.b, self.other, self.c, self.changed, self.twice, self.last = (
            nn.Linear(8, out, bias=bias) for out in (8, 3, 5, 8, 7, 4, 6)
        )
        self.free = nn.Linear(8, 2, bias=not bias)

    def forward(self, x):
        outs = [self.a(x), self.b(x), self.free(x), self.twice(x), self.twice(x)]
        outs += [self.other(x + 0), self.c(x)]
        x = x.clone()
        outs.append(self.last(x))
        x.mul_(2)
        return torch.cat([*outs, self.changed(x)], dim=-1)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_read_the_same_tensor_are_one_product(bias, monkeypatch):
    torch.manual_seed(0)
    plain = Sharing(bias).requires_grad_(False)
    joined = copy.deepcopy(plain)
    run = partial(joined, torch.zeros(2, 8))
    assert [[out.out_features for out in group] for group in same_inputs(joined, run)] == [[8, 3, 8]]
    expected = bytes_read(joined)
    assert pack_linears(joined, run) == 8
    assert bytes_read(joined) == expected, "a joined weight is read once"
    assert [type(layer) for layer in (joined.a, joined.b, joined.c, joined.last)] == [JointLinear] * 3 + [PackedLinear]
    for layer, whole in ((joined.a, plain.a), (joined.b, plain.b), (joined.c, plain.c)):
        assert torch.equal(layer.weight, whole.weight)
        assert layer.bias is None if whole.bias is None else torch.equal(layer.bias, whole.bias)
        assert (layer.in_features, layer.out_features) == (whole.in_features, whole.out_features)
    products = []
    product = PackedLinear.product
    monkeypatch.setattr(PackedLinear, "product", lambda layer, x: products.append(layer) or product(layer, x))
    with torch.inference_mode():
        for x in torch.randn(3, 5, 8):
            assert torch.allclose(joined(x), plain(x), atol=1e-5)
    assert products.count(joined.a.product) == 3, "once in each pass"
    assert joined.a.joint._last is None, "nothing is held"


def test_a_joint_product_is_made_anew_for_another_tensor():
    """Also where a layer is left out, or asked out of turn, as another thread's pass may."""
    plain = Sharing().requires_grad_(False)
    joined = copy.deepcopy(plain)
    pack_linears(joined, partial(joined, torch.zeros(2, 8)))
    x, y = torch.randn(2, 3, 8)
    with torch.inference_mode():
        for name, given in (("a", x), ("b", y), ("b", x), ("a", y), ("c", y), ("a", y), ("b", x), ("c", x), ("c", x)):
            layer, whole = getattr(joined, name), getattr(plain, name)
            assert torch.allclose(layer(given), whole(given), atol=1e-5), (name, given is x)


@pytest.mark.parametrize("joined", [False, True])
def test_a_packed_backbone_decodes_the_same_tokens_and_still_gives_its_projection(joined):
    plain, packed = make_llama(tie_word_embeddings=True), make_llama(tie_word_embeddings=True)
    run = (lambda: packed(input_ids=torch.zeros(1, 2, dtype=torch.long))) if joined else None
    assert pack_linears(packed, run) == 2 * 7 + 1
    joints = {module.joint for module in packed.modules() if isinstance(module, JointLinear)}
    assert sorted(len(joint.sizes) for joint in joints) == ([2, 2, 3, 3] if joined else [])
    backbone = Backbone.wrap(packed)
    assert torch.equal(backbone.projection_rows(torch.tensor([3, 9])), plain.lm_head.weight[[3, 9]])
    prompt = torch.tensor([5, 6, 7])
    expected = plain.generate(prompt[None], max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None)
    for drafter in (NoDrafter(), None):
        model = MedusaModel(backbone, random_heads(), Tree.from_paths([(0, 0), (1,)]))
        out = model.generate(prompt, 40, eos_token_ids=(), drafter=drafter)
        assert torch.equal(out.sequences, expected)
