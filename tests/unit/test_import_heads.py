"""Heads of other tools: every layout comes in exactly, and what is wrong with a folder is named."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from conftest import make_llama, random_heads
from medusa_train.formats import portable_config, portable_tensors
from medusa_train.import_heads import import_heads
from medusa_train.inference import MedusaModel, UserError
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import load_heads

HEADS = random_heads()
TENSORS = portable_tensors(HEADS)
BLOCKS = {name: tensor for name, tensor in TENSORS.items() if "linear" in name}
LMHEAD = make_llama().lm_head.weight.detach()


def as_vllm(tensors):
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, rest = name.split(".", 2)
        linear = rest.removeprefix("linear.")
        renamed[f"blocks.{head}.layers.{layer}.{linear}" if linear != rest else f"lm_heads.{head}.{rest}"] = tensor
    return renamed


def write(folder, tensors, file="medusa_lm_head.safetensors", **config):
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    content = portable_config(HEADS.config, "org/base") | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return folder


def imported(folder, backbone=None):
    out = folder.with_name("imported")
    import_heads(folder, out, backbone)
    return load_heads(out)


def equal(heads, tensors):
    found = portable_tensors(heads)
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
@pytest.mark.parametrize(
    "file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin"]
)
@pytest.mark.parametrize("names", [dict, as_vllm], ids=["fasterdecoding", "vllm"])
def test_heads_with_projections_of_their_own(tmp_path, names, file, prefix):
    folder = write(tmp_path / "in", {prefix + name: tensor for name, tensor in names(TENSORS).items()}, file)
    checkpoint = imported(folder)
    assert equal(checkpoint.heads, TENSORS)
    assert checkpoint.backbone_source == "org/base"
    assert checkpoint.probe is None


def test_the_original_config_names_little_and_fewer_heads_than_there_are(tmp_path):
    folder = write(
        tmp_path / "in", TENSORS, "medusa_lm_head.pt", medusa_num_heads=2, num_medusa_heads=None, vocab_size=None,
        hidden_size=None, medusa_fc_bias=None, num_medusa_layers=None,
    )  # fmt: skip
    (note,) = import_heads(folder, tmp_path / "out")
    assert note == "config.json says 2 heads, the weights hold 3: all 3 were taken"
    assert equal(load_heads(tmp_path / "out").heads, TENSORS)


def test_the_layout_with_a_shared_projection_stays_shared(tmp_path):
    backbone = Backbone.wrap(make_llama(), "org/backbone")
    folder = write(tmp_path / "in", BLOCKS, vocab_size=None)
    with pytest.raises(UserError, match=r"a shared lm_head, as in FasterDecoding v2 and TGI v2.*use --backbone"):
        import_heads(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for source, given in ((folder, backbone), (write(tmp_path / "sized", BLOCKS), None)):
        checkpoint = imported(source, given)
        assert checkpoint.heads.config.lm_head == "shared"
        assert equal(checkpoint.heads, BLOCKS)
        shutil.rmtree(tmp_path / "imported")
    checkpoint = imported(folder, backbone)
    assert checkpoint.backbone_source == "org/backbone"
    assert checkpoint.probe == pytest.approx(backbone.probe)
    hidden = torch.randn(4, 32)
    own = HEADS.state_dict() | {f"heads.{head}.1.weight": LMHEAD for head in range(3)}
    theirs = random_heads()
    theirs.load_state_dict(own)
    for head in range(3):
        assert torch.equal(MedusaModel(backbone, checkpoint.heads).heads(hidden, head), theirs(hidden, head))


def test_heads_of_other_sizes_than_the_backbone_are_refused(tmp_path):
    folder = write(tmp_path / "in", TENSORS)
    for changes in ({"vocab_size": 96}, {"hidden_size": 64}):
        with pytest.raises(UserError, match=r"hidden size 32 and vocabulary 64, b has"):
            import_heads(folder, tmp_path / "x", Backbone.wrap(make_llama(**changes), "b"))


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_vllms_one_projection_for_all_heads(tmp_path, name):
    folder = write(tmp_path / "in", as_vllm(BLOCKS) | {name: LMHEAD}, original_lm_head=True)
    assert equal(imported(folder).heads, BLOCKS | {f"{head}.1.weight": LMHEAD for head in range(3)})


@pytest.mark.parametrize("rows", [4, 64])
def test_vllms_token_map_is_a_draft_vocabulary(tmp_path, rows):
    ids = torch.tensor([5, 6, 7, 60])
    tensors = as_vllm(TENSORS) | {"token_map": ids}
    if rows == 4:
        tensors |= {f"lm_heads.{head}.weight": TENSORS[f"{head}.1.weight"][ids] for head in range(3)}
    heads = imported(write(tmp_path / "in", tensors, truncated_vocab_size=4)).heads
    assert heads.draft_token_ids.tolist() == ids.tolist()
    assert heads.config.draft_vocab_size == 4
    assert torch.equal(heads.state_dict()["heads.2.1.weight"], TENSORS["2.1.weight"][ids])


def test_a_token_map_goes_with_a_shared_projection(tmp_path):
    ids = torch.tensor([5, 6, 7, 60])
    heads = imported(write(tmp_path / "in", as_vllm(BLOCKS) | {"token_map": ids})).heads
    assert (heads.config.lm_head, heads.config.draft_vocab_size) == ("shared", 4)
    assert heads.draft_token_ids.tolist() == ids.tolist()


def test_layers_without_biases_get_zeros(tmp_path):
    tensors = {name: tensor for name, tensor in as_vllm(TENSORS).items() if not name.endswith("bias")}
    heads = imported(write(tmp_path / "in", tensors, medusa_fc_bias=False)).heads
    assert not heads.state_dict()["heads.1.0.linear.bias"].any()
    folder = write(tmp_path / "biased", TENSORS, medusa_fc_bias=False)
    assert "vLLM follows" in import_heads(folder, tmp_path / "out")[0]


def without(*names):
    return {name: tensor for name, tensor in TENSORS.items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "config", "told"),
    [
        (TENSORS, {"medusa_num_heads": 5, "num_medusa_heads": 5}, "holds 3 heads, but config.json says 5"),
        (TENSORS, {"medusa_num_heads": 5}, r"two numbers of heads, \[3, 5\]"),
        (TENSORS, {"medusa_num_layers": 2, "num_medusa_layers": 2}, "holds 1 layers, but config.json says 2"),
        (TENSORS, {"hidden_size": 4096}, "hidden_size 32, but config.json says 4096"),
        (TENSORS, {"vocab_size": 32001}, "vocab_size 64, but config.json says 32001"),
        (TENSORS, {"original_lm_head": True}, r"projections of their own \(head 0, 1, 2\)"),
        (BLOCKS, {"vocab_size": 10**15}, "vocab_size 1000000000000000 is no size of a vocabulary"),
        (BLOCKS, {"vocab_size": "64"}, "vocab_size '64' is no size of a vocabulary"),
        (without("1.1.weight"), {}, "projections of each head's own.*head 1 has none"),
        (without("1.0.linear.weight"), {}, "head 1 lacks its layer 0"),
        (without("1.0.linear.bias"), {}, "only 2 of 3 layers have a bias"),
        (without("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"), {}, "holds head 2, but not head 1"),
        (TENSORS | {"0.1.linear.weight": torch.eye(32)}, {}, "0.1.weight stands behind 2 layers"),
        ({f"{name}": t for name, t in TENSORS.items() if "linear" not in name}, {}, "stands behind 0 layers"),
        (TENSORS | {"lm_heads.0.weight": LMHEAD}, {}, "is there twice, under two names"),
        (TENSORS | {"model.layers.0.mlp.up_proj.weight": torch.zeros(2)}, {}, "not that of a whole model"),
        (TENSORS | {"draft_token_ids": torch.arange(64)}, {}, "a checkpoint of medusa-train already"),
        (TENSORS | {"1.0.linear.bias": torch.zeros(31)}, {}, r"1.0.linear.bias has shape \(31,\), expected \(32,\)"),
        (TENSORS | {"1.1.weight": torch.zeros(0, 32)}, {}, "1.1.weight is empty"),
        (TENSORS | {"1.1.weight": torch.zeros(64, 32, dtype=torch.int8)}, {}, "no floating-point numbers"),
        (TENSORS | {"0.1.weight": torch.zeros(64)}, {}, "are no matrices"),
        (TENSORS | {"99999999.1.weight": LMHEAD}, {}, "belongs to no layout"),
        (TENSORS | {"token_map": torch.tensor([1, 1])}, {}, "does not name 2 different tokens"),
        (TENSORS | {"token_map": torch.tensor([1, 64])}, {}, "does not name 2 different tokens"),
        ({"token_map": torch.tensor([1])}, {}, "holds no heads"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path, tensors, config, told):
    folder = write(tmp_path / "in", tensors, **config)
    with pytest.raises(UserError, match=told):
        import_heads(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_pickled_code_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "in", TENSORS, "medusa_lm_head.pt")
    for content in (
        lambda file: torch.save(TENSORS | {"bomb": Bomb()}, file),
        lambda file: file.write_bytes(pickle.dumps(Bomb())),
    ):
        content(folder / "medusa_lm_head.pt")
        with pytest.raises(UserError, match="could run code; it is left alone"):
            import_heads(folder, tmp_path / "out")
    assert not (tmp_path / "exploded").exists()


def test_names_in_configs_open_no_file(tmp_path):
    """Weights are found by their own names in the folder; an index that points outside is not followed."""
    save_file({name: tensor.clone() for name, tensor in TENSORS.items()}, tmp_path / "secret.safetensors")
    folder = tmp_path / "in"
    folder.mkdir()
    config = portable_config(HEADS.config, "b") | {"weights": "../secret.safetensors", "_name_or_path": "../"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "evil.py"}}))
    index = {"weight_map": dict.fromkeys(TENSORS, "../secret.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="holds no weights"):
        import_heads(folder, tmp_path / "out")


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("size", [0, 100])
def test_damaged_files(tmp_path, file, size):
    folder = write(tmp_path / "in", TENSORS, file)
    (folder / file).write_bytes((folder / file).read_bytes()[:size])
    with pytest.raises(UserError, match="is damaged"):
        import_heads(folder, tmp_path / "out")


@pytest.mark.parametrize(("text", "told"), [("{", "is not JSON"), ("[]", "is not a config"), (None, "no config.json")])
def test_a_config_that_is_none(tmp_path, text, told):
    folder = write(tmp_path / "in", TENSORS)
    (folder / "config.json").unlink()
    if text:
        (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=told):
        import_heads(folder, tmp_path / "out")


def test_a_list_of_tensors_and_a_tensor_in_two_files(tmp_path):
    folder = write(tmp_path / "in", TENSORS, "medusa_lm_head.pt")
    torch.save(list(TENSORS.values()), folder / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="holds no tensors by name"):
        import_heads(folder, tmp_path / "out")
    folder = write(tmp_path / "two", TENSORS, "a.safetensors")
    write(folder, {"0.1.weight": LMHEAD}, "b.safetensors")
    with pytest.raises(UserError, match="is in two files"):
        import_heads(folder, tmp_path / "out")
