"""Heads on disk: exact round trip, names that engines read, and errors that name the tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import KINDS, make_llama, random_heads, reading
from medusa_train.inference import HeadsConfig, MedusaHeads, MedusaModel, Tree, UserError
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import TREE, expected_shapes, load_heads, save_heads, save_tree

WEIGHTS = "medusa_lm_head.safetensors"


@pytest.fixture
def saved(tmp_path):
    save_heads(tmp_path, random_heads(), Backbone.wrap(make_llama(), "base"), Tree.chain(2))
    return tmp_path


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / WEIGHTS)


def test_round_trip_is_exact(saved):
    checkpoint = load_heads(saved)
    for name, tensor in random_heads().state_dict().items():
        assert torch.equal(checkpoint.heads.state_dict()[name], tensor), name
    assert checkpoint.tree == Tree.chain(2)
    assert checkpoint.backbone_source == "base"


def test_trees_of_batches_and_the_reasons_for_them_are_kept(saved):
    trees = {4: Tree.chain(1), 16: Tree.root_only()}
    save_tree(saved, Tree.chain(2), batch_trees=trees, reasons={1: "it was there", 4: "it was smaller"})
    loaded = load_heads(saved)
    assert (loaded.tree, loaded.batch_trees) == (Tree.chain(2), trees)
    content = json.loads((saved / TREE).read_text())
    assert content["chosen_because"] == "it was there"
    assert content["batches"] == {
        "4": {"chosen_because": "it was smaller", "paths": [[0]]}, "16": {"paths": []},
    }  # fmt: skip
    save_tree(saved, Tree.chain(2))
    assert load_heads(saved).batch_trees == {}


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ({"four": {"paths": [[0]]}}, "'batches' is damaged"),
        ({"4": [[0]]}, "'batches' is damaged"),
        ({"4": {}}, "'batches' is damaged"),
        ([4], "'batches' is damaged"),
        ({"4": {"paths": [[-1]]}}, "whole numbers from 0"),
        ({"1": {"paths": [[0]]}}, "a batch of 1; batches have two prompts or more"),
        ({"4": {"paths": [[0]]}, "0": {"paths": [[0]]}}, "a batch of 0; batches have two prompts or more"),
    ],
)
def test_damaged_trees_of_batches(saved, batches, told):
    (saved / TREE).write_text(json.dumps({"paths": [[0]], "batches": batches}))
    with pytest.raises(UserError, match=told):
        load_heads(saved)


def test_a_reduced_vocabulary_round_trips(tmp_path):
    heads = MedusaHeads(HeadsConfig(2, 1, 8, 64, draft_vocab_size=4), torch.tensor([3, 9, 40, 63]))
    heads.save_pretrained(tmp_path)
    again = MedusaHeads.from_pretrained(tmp_path)
    assert again.draft_token_ids.tolist() == [3, 9, 40, 63]
    assert again.config == heads.config


def test_names_and_config_are_those_that_engines_read(saved):
    assert set(load_file(saved / WEIGHTS)) == {
        f"{head}.{name}" for head in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    config = json.loads((saved / "config.json").read_text())
    assert "architectures" not in config  # TGI would take the folder for a whole model
    assert config["medusa_num_heads"] == config["num_medusa_heads"] == 3
    assert config["medusa_fc_bias"] is True


@pytest.mark.parametrize("count", [2, 5])
def test_a_head_count_that_disagrees_with_the_tensors(saved, count):
    edit_config(saved, medusa_num_heads=count)
    with pytest.raises(UserError, match=f"holds 3 heads, but config.json says {count}"):
        load_heads(saved)


def test_a_missing_head_count(saved):
    edit_config(saved, medusa_num_heads=None)
    with pytest.raises(UserError, match="medusa_num_heads is missing"):
        load_heads(saved)


def test_a_layer_count_that_disagrees(saved):
    edit_config(saved, medusa_num_layers=2)
    with pytest.raises(UserError, match="holds 1 layers a head"):
        load_heads(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "tensor 1.0.linear.bias is missing"),
        (lambda t: t.update({"0.surplus": torch.zeros(1)}), "tensor 0.surplus does not belong"),
        (lambda t: t.update({"2.1.weight": torch.zeros(64, 31)}), r"2.1.weight has shape \(64, 31\)"),
        (lambda t: t.update({"0.1.weight": torch.zeros(0, 32)}), r"0.1.weight has shape \(0, 32\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, change, message):
    edit_tensors(saved, change)
    with pytest.raises(UserError, match=message):
        load_heads(saved)


def test_a_damaged_file(saved):
    (saved / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged"):
        load_heads(saved)


def test_an_empty_parameter_is_not_saved(tmp_path):
    heads = random_heads()
    heads.heads[1][1].weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(UserError, match=r"1\.1\.weight is empty"):
        heads.save_pretrained(tmp_path)
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.parametrize("share", [torch.zeros(16, 32), torch.zeros(64 * 32)])
def test_a_share_of_a_parameter_is_not_saved(tmp_path, share):
    heads = random_heads()
    heads.heads[1][1].weight = torch.nn.Parameter(share)
    with pytest.raises(UserError, match=r"1\.1\.weight is \(\d+,.*\), not \(64, 32\) \(sharded\?\); gather"):
        heads.save_pretrained(tmp_path)
    assert not (tmp_path / WEIGHTS).exists()


def test_heads_without_one_of_them_are_not_saved(tmp_path):
    heads = random_heads()
    del heads.heads[2]
    with pytest.raises(UserError, match=r"2\.0\.linear\.weight is missing, not \(32, 32\)"):
        heads.save_pretrained(tmp_path)
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_a_config_have_their_sizes_before_they_have_memory(kind, lm_head):
    """Sizes come from the config alone; a backbone under ZeRO-3 would give empty ones."""
    config = HeadsConfig(3, 2, 32, 64, 16, lm_head=lm_head, **reading(kind))
    with torch.device("meta"):
        heads = MedusaHeads(config)
    assert {name.removeprefix("heads."): tuple(t.shape) for name, t in heads.state_dict().items()} == expected_shapes(
        config
    )


def test_heads_alone_are_loaded_beside_a_backbone_and_its_own_errors_are_told(saved, tmp_path_factory):
    """A folder of heads is no model that transformers knows; nothing about it may hide what is wrong elsewhere."""
    base = tmp_path_factory.mktemp("base")
    make_llama().save_pretrained(base)
    model = MedusaModel.from_pretrained(saved, str(base), "float32", "cpu")
    assert torch.equal(model.heads.heads[2][1].weight, random_heads().heads[2][1].weight)
    with pytest.raises(UserError, match=r"^backbone ./none: no such folder$"):
        MedusaModel.from_pretrained(saved, "./none")
    with pytest.raises(UserError, match=f"^cannot load the model of backbone {saved}: .*medusa"):
        MedusaModel.from_pretrained(saved, str(saved), "float32", "cpu")
    (base / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=f"^cannot load the model of backbone {base}: .*header"):
        MedusaModel.from_pretrained(saved, str(base), "float32", "cpu")


def test_heads_of_another_backbone_of_the_same_shape_are_refused(saved):
    with pytest.raises(UserError, match="trained on another backbone"):
        MedusaModel.from_pretrained(saved, make_llama(seed=5))
    half = MedusaModel.from_pretrained(saved, make_llama().to(torch.bfloat16))  # the same model, rounded
    assert half.heads.heads[0][1].weight.dtype == torch.bfloat16


def test_heads_of_another_vocabulary_are_refused(saved):
    with pytest.raises(UserError, match="vocabulary 64, this one has 32 and 96"):
        MedusaModel.from_pretrained(saved, make_llama(vocab_size=96))


@pytest.mark.parametrize("tied", [True, False])
def test_fresh_heads_equal_the_backbone_and_leave_it_alone(tmp_path, tied):
    model = make_llama(tie_word_embeddings=tied)
    backbone = Backbone.wrap(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    heads = MedusaHeads.for_backbone(backbone, HeadsConfig(3, 2, 32, 64))
    hidden = backbone.hidden_states(torch.tensor([[5, 6, 7]]))
    for head in range(3):
        assert torch.equal(heads(hidden, head), backbone.logits(hidden))
    heads.save_pretrained(tmp_path)
    with torch.no_grad():
        heads.heads[0][-1].weight.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert len(load_file(tmp_path / WEIGHTS)) == 3 * 5


@pytest.mark.parametrize("draft_vocabulary", [0, 16])
def test_heads_that_share_the_projection_keep_no_copy_of_it(tmp_path, draft_vocabulary):
    backbone = Backbone.wrap(make_llama())
    ids = torch.arange(3, 3 + draft_vocabulary) if draft_vocabulary else None
    config = HeadsConfig(2, 1, 32, 64, draft_vocabulary, lm_head="shared")
    heads = MedusaHeads.for_backbone(backbone, config, ids)
    hidden = torch.randn(5, 32)
    assert torch.allclose(heads(hidden, 1), backbone.logits(hidden)[:, heads.draft_token_ids], atol=1e-6)
    for name, parameter in heads.named_parameters():
        if not name.startswith("shared."):
            torch.nn.init.normal_(parameter)
    save_heads(tmp_path, heads, backbone)
    names = set(load_file(tmp_path / "medusa_lm_head.safetensors"))
    assert names - {"draft_token_ids"} == {f"{k}.0.linear.{part}" for k in range(2) for part in ("weight", "bias")}
    again = load_heads(tmp_path).heads
    with pytest.raises(UserError, match="share_projection"):
        again(hidden, 0)
    model = MedusaModel(backbone, again, Tree.chain(2))
    for head in range(2):
        assert torch.allclose(model.heads(hidden, head), heads(hidden, head), atol=1e-5)


def test_the_two_layouts_are_never_mistaken_for_each_other(tmp_path):
    heads = MedusaHeads.for_backbone(Backbone.wrap(make_llama()), HeadsConfig(2, 1, 32, 64, lm_head="shared"))
    for folder, own in ((tmp_path / "shared", heads), (tmp_path / "own", random_heads())):
        own.save_pretrained(folder)
        declared = json.loads((folder / "config.json").read_text())["original_lm_head"]
        edit_config(folder, original_lm_head=not declared)
    with pytest.raises(
        UserError, match=r"holds heads with the backbone's projection, but config\.json says projections"
    ):
        load_heads(tmp_path / "shared")
    with pytest.raises(
        UserError, match=r"holds heads with projections of their own, but config\.json says the backbone"
    ):
        load_heads(tmp_path / "own")


def test_weights_may_be_read_by_whom_the_config_may(saved):
    modes = {(saved / name).stat().st_mode for name in (WEIGHTS, "config.json")}
    assert len(modes) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b'{"a":' + b"[" * 100_000, b"{"], ids=["utf", "deep", "cut"])
@pytest.mark.parametrize("name", ["config.json", "tree.json"])
def test_damaged_json_is_named_whatever_the_damage(saved, name, content):
    (saved / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}"):
        load_heads(saved)


@pytest.mark.parametrize("value", [True, 10**400, "3", 2.0])
@pytest.mark.parametrize("key", ["medusa_num_heads", "vocab_size"])
def test_a_count_that_is_none_is_refused(saved, key, value):
    edit_config(saved, **{key: value})
    with pytest.raises(UserError, match=f"{key} is missing or not a whole number"):
        load_heads(saved)


@pytest.mark.parametrize("value", ["no", 1, None, []])
def test_reading_copies_is_yes_or_no(saved, value):
    edit_config(saved, reads_copies=value or "")
    with pytest.raises(UserError, match="reads_copies must be true or false"):
        load_heads(saved)


def test_a_backbone_of_absurd_name_is_refused(saved):
    edit_config(saved, base_model_name_or_path="a" * 5000)
    with pytest.raises(UserError, match=r"backbone a{40}…: no folder or repository has so long a name"):
        MedusaModel.from_pretrained(saved)
    with pytest.raises(UserError, match=r"heads b{40}…: no folder or repository has so long a name"):
        load_heads("b" * 5000)
