"""Exported folders hold exactly what engines read, and say no where an engine would draft nonsense."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import linear, silu

from conftest import assert_refused, make_llama, random_heads
from medusa_train.formats import export_heads, pad_projection
from medusa_train.import_heads import import_heads
from medusa_train.inference import HeadsConfig, MedusaHeads, UserError
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import load_heads, save_heads

ENGINES = ["vllm", "tgi", "fasterdecoding"]
KEYS = {"0.linear.weight", "0.linear.bias", "1.weight"}


def make(num_layers=1, num_heads=3, draft_token_ids=None, dtype=torch.float32, **reads):
    torch.manual_seed(3)
    draft = 0 if draft_token_ids is None else len(draft_token_ids)
    heads = MedusaHeads(HeadsConfig(num_heads, num_layers, 32, 64, draft, **reads), draft_token_ids)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.to(dtype).requires_grad_(False)


@pytest.fixture
def saved(tmp_path):
    def save(heads, source="org/backbone"):
        folder = tmp_path / "heads"
        save_heads(folder, heads, Backbone.wrap(make_llama(), source))
        return folder

    return save


def as_fasterdecoding(folder, head, hidden):
    """nn.Sequential of residual blocks and a projection, filled from the .pt file."""
    tensors = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    return as_tgi_reads(tensors, json.loads((folder / "config.json").read_text()), head, hidden)


def as_tgi(folder, head, hidden):
    """Blocks 0..L-1 with mandatory biases, the projection under index L."""
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    return as_tgi_reads(tensors, json.loads((folder / "config.json").read_text()), head, hidden)


def as_tgi_reads(tensors, config, head, hidden):
    layers = config["medusa_num_layers"]
    for layer in range(layers):
        name = f"{head}.{layer}.linear"
        hidden = hidden + silu(linear(hidden, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
    return linear(hidden, tensors[f"{head}.{layers}.weight"])


def as_vllm(folder, head, hidden):
    """Any key with num and heads is the number of heads; names are mapped; biases only where the config says so."""
    config = json.loads((folder / "config.json").read_text())
    (num_heads,) = {value for key, value in config.items() if "num" in key and "heads" in key}
    (num_layers,) = {value for key, value in config.items() if "num" in key and "layers" in key}
    assert head < num_heads
    assert config["hidden_size"] == hidden.shape[-1]
    mapped = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            number, layer, rest = name.split(".", 2)
            block = rest.startswith("linear.")
            mapped[f"blocks.{number}.layers.{layer}.{rest[7:]}" if block else f"lm_heads.{number}.{rest}"] = tensor
    for layer in range(num_layers):
        name = f"blocks.{head}.layers.{layer}"
        bias = mapped[f"{name}.bias"] if config.get("medusa_fc_bias") else None
        hidden = hidden + silu(linear(hidden, mapped[f"{name}.weight"], bias))
    projection = mapped[f"lm_heads.{head}.weight"]
    assert len(projection) == config["vocab_size"]
    return linear(hidden, projection)


READERS = {"vllm": as_vllm, "tgi": as_tgi, "fasterdecoding": as_fasterdecoding}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exported_folder_holds_exactly_what_is_read(saved, tmp_path, engine):
    out = tmp_path / "out"
    export_heads(saved(make()), out, engine)
    pickled = {"medusa_lm_head.pt"} if engine == "fasterdecoding" else set()
    assert {path.name for path in out.iterdir()} == {"config.json", "medusa_lm_head.safetensors"} | pickled
    names = {f"{head}.{name}" for head in range(3) for name in KEYS}
    assert set(load_file(out / "medusa_lm_head.safetensors")) == names
    if pickled:
        assert set(torch.load(out / "medusa_lm_head.pt", weights_only=True)) == names
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "medusa", "base_model_name_or_path": "org/backbone", "medusa_num_heads": 3,
        "medusa_num_layers": 1, "num_medusa_heads": 3, "num_medusa_layers": 1, "medusa_fc_bias": True,
        "hidden_size": 32, "vocab_size": 64, "version": "2",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("engine", "num_layers"), [("vllm", 0), ("vllm", 2), ("tgi", 2), ("fasterdecoding", 1)])
def test_what_an_engine_reads_gives_the_logits_bit_for_bit(saved, tmp_path, engine, num_layers, dtype):
    heads, hidden = make(num_layers, dtype=dtype), torch.randn(5, 32, dtype=dtype)
    export_heads(saved(heads), tmp_path / "out", engine)
    for head in range(3):
        assert torch.equal(READERS[engine](tmp_path / "out", head, hidden), heads(hidden, head))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_padded_vocabulary_drafts_the_same_tokens(saved, tmp_path, engine):
    ids, hidden = torch.tensor([2, 3, 9, 40, 41, 63]), torch.randn(50, 32)
    heads = make(draft_token_ids=ids)
    folder = saved(heads)
    with pytest.raises(UserError, match=r"draft 6 of 64 tokens.*draft_vocab_size=0.*--pad-vocabulary"):
        export_heads(folder, tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()
    export_heads(folder, tmp_path / "out", engine, pad_vocabulary=True)
    for head in range(3):
        theirs, ours = READERS[engine](tmp_path / "out", head, hidden), heads(hidden, head)
        assert torch.allclose(theirs[:, ids], ours, atol=1e-5)  # a wider product rounds differently
        assert torch.equal(theirs.argmax(dim=-1), ids[ours.argmax(dim=-1)])


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_no_padded_row_ever_exceeds_the_best_draft(seed, columns):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(20, generator=generator)[:columns]
    rows, hidden = torch.randn(columns, 16, generator=generator), torch.randn(16, 8, generator=generator)
    padded = pad_projection(rows, ids, 20)
    assert torch.equal(padded[ids], rows)
    assert ((padded @ hidden).max(dim=0).values <= (rows @ hidden).max(dim=0).values + 1e-5).all()


@pytest.mark.parametrize(
    ("heads", "engine", "source", "told"),
    [
        (
            lambda: make(kind="hydra"),
            "vllm",
            "org/b",
            "no hydra heads; for serving, train with heads.kind=medusa heads.reads_copies=false",
        ),
        (
            lambda: make(reads_copies=True),
            "vllm",
            "org/b",
            "looks up no copies for heads to read; for serving, train with heads.kind=medusa heads.reads_copies=false",
        ),
        (lambda: make(2), "fasterdecoding", "org/b", "2 layers, but FasterDecoding/Medusa gives all layers"),
        (make, "tgi", "pkg://package/file.gguf", "TGI loads the backbone that the config names"),
        (make, "fasterdecoding", "", "use --backbone with a Hub id or a folder"),
    ],
)
def test_what_an_engine_cannot_carry_is_refused(saved, tmp_path, heads, engine, source, told):
    folder = saved(heads(), source)
    with pytest.raises(UserError, match=re.escape(told)):
        export_heads(folder, tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def shared(tmp_path):
    """Heads that share the projection of a backbone on disk: (folder, heads with it, backbone)."""
    make_llama().save_pretrained(tmp_path / "backbone")
    backbone = Backbone.wrap(make_llama(), str(tmp_path / "backbone"))

    def save(num_layers=1, ids=None):
        draft = 0 if ids is None else len(ids)
        heads = MedusaHeads(HeadsConfig(3, num_layers, 32, 64, draft, lm_head="shared"), ids)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        heads.share_projection(backbone)
        save_heads(tmp_path / "heads", heads.requires_grad_(False), backbone)
        return tmp_path / "heads", heads, backbone

    return save


def test_a_shared_projection_goes_to_vllm_as_one_copy(shared, tmp_path):
    folder, heads, backbone = shared(num_layers=2)
    export_heads(folder, tmp_path / "out", "vllm")
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["original_lm_head"] is True
    assert torch.equal(tensors.pop("0.2.weight"), backbone.projection_rows())
    names = {f"{head}.{layer}.linear.{part}" for head in range(3) for layer in (0, 1) for part in ("weight", "bias")}
    assert set(tensors) == names
    # What came out goes in again, as a copy or, where the backbone is there to compare, as its own.
    import_heads(tmp_path / "out", tmp_path / "alone")
    import_heads(tmp_path / "out", tmp_path / "beside", backbone)
    alone, beside = load_heads(tmp_path / "alone").heads, load_heads(tmp_path / "beside").heads
    assert (alone.config.lm_head, beside.config.lm_head) == ("own", "shared")
    beside.share_projection(backbone)
    hidden = torch.randn(5, 32)
    for head in range(3):
        assert torch.equal(alone(hidden, head), heads(hidden, head))
        assert torch.equal(beside(hidden, head), heads(hidden, head))


def test_a_shared_projection_goes_to_tgi_as_nothing(shared, tmp_path):
    folder, heads, backbone = shared(ids=torch.tensor([1, 2, 3]))  # TGI drafts all that the backbone can say
    export_heads(folder, tmp_path / "out", "tgi")
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert set(tensors) == {f"{head}.0.linear.{part}" for head in range(3) for part in ("weight", "bias")}
    hidden = torch.randn(5, 32)
    read = hidden + silu(linear(hidden, tensors["1.0.linear.weight"], tensors["1.0.linear.bias"]))
    ours = heads(hidden, 1)
    assert torch.allclose(linear(read, backbone.projection_rows())[:, [1, 2, 3]], ours, atol=1e-5)


def test_shared_projections_that_an_engine_cannot_carry(shared, tmp_path):
    folder, _, _ = shared(num_layers=2)
    with pytest.raises(UserError, match=r"gives every head a projection; train with heads.lm_head=own"):
        export_heads(folder, tmp_path / "out", "fasterdecoding")
    with pytest.raises(UserError, match=r"2 layers, but TGI takes one where the lm_head is shared"):
        export_heads(folder, tmp_path / "out", "tgi")
    make_llama(seed=5).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="trained on another backbone"):
        export_heads(folder, tmp_path / "out", "vllm", str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_another_name_for_the_backbone(saved, tmp_path):
    export_heads(saved(make(), "pkg://package/file.gguf"), tmp_path / "out", "tgi", "org/hub-id")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["base_model_name_or_path"] == "org/hub-id"


def test_nothing_is_written_over_or_beside_what_is_there(saved, tmp_path):
    folder = saved(random_heads())
    with pytest.raises(UserError, match="is not empty"):
        export_heads(folder, folder, "vllm")
    with pytest.raises(UserError, match="is a file"):
        export_heads(folder, folder / "config.json", "vllm")
    assert load_heads(folder).heads.config.num_heads == 3


def test_the_commands(command, saved, tmp_path):
    folder = saved(make())
    code, output, _ = command("export", folder, "for-vllm", "--to", "vllm")
    assert code == 0
    assert '{"method": "medusa", "model": "for-vllm", "num_speculative_tokens": 3}' in output
    code, output, _ = command("export", folder, "original", "--to", "fasterdecoding")
    assert (code, "makes 5 heads whatever config.json says" in output) == (0, True)
    assert command("import", "for-vllm", "back")[0] == 0
    back = load_heads(tmp_path / "back")
    assert back.backbone_source == "org/backbone"
    for name, tensor in make().state_dict().items():
        assert torch.equal(back.heads.state_dict()[name], tensor)
    assert_refused(command("export", folder, "x", "--to", "sglang"), "--to 'sglang' is unknown")
    assert_refused(command("import", "for-vllm", "back"), "back is not empty")
    assert_refused(command("import", "nowhere/at/all", "y"), "no such folder")
