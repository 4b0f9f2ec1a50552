"""A GGUF file is converted once; what its copy gives is what the file gives, and a bad copy is made again."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from medusa_train.data.chat import load_chat_tokenizer, render_prompt
from medusa_train.inference import backbone as backbone_module
from medusa_train.inference import gguf_copy, load_backbone

WIDTH, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 4, 2, 96
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tiny random Llama, packed in Q4_1, with a byte-level tokenizer that has a chat template."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    letters = [chr(place) for place in range(33, 127)] + ["Ġ", "Ċ", "th", "the"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * len(letters))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    random = np.random.default_rng(0)

    def add(name, *shape, packed=True):
        weights = random.normal(0, 0.3, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if packed else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH, packed=False)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", WIDTH, packed=False)
        add(f"blk.{layer}.ffn_norm.weight", WIDTH, packed=False)
        add(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH)
        for name in ("attn_k", "attn_v"):
            add(f"blk.{layer}.{name}.weight", WIDTH * KV_HEADS // HEADS, WIDTH)
        add(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "medusa-train"


@pytest.fixture
def conversions(monkeypatch):
    """What was read from a GGUF file since the test began."""
    seen = []
    for loader in (AutoModelForCausalLM, AutoTokenizer):
        original = loader.from_pretrained

        def counted(*arguments, original=original, loader=loader, **options):
            seen.extend([loader.__name__] if "gguf_file" in options else [])
            return original(*arguments, **options)

        monkeypatch.setattr(f"{backbone_module.__name__}.{loader.__name__}.from_pretrained", counted)
    return seen


def load(gguf_file, dtype="float32"):
    """The weights, and an answer of the backbone."""
    backbone = load_backbone(str(gguf_file), dtype, "cpu")
    assert backbone.source == str(gguf_file)
    with torch.inference_mode():
        return backbone.logits(backbone.hidden_states(torch.tensor([[5, 6, 7]])))


def copies(home):
    return sorted(path for path in home.iterdir() if not path.name.startswith(".")) if home.exists() else []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_holds_the_files_weights_bit_by_bit(gguf_file, home, conversions, dtype):
    first = load(gguf_file, dtype)
    assert conversions == ["AutoModelForCausalLM"]
    (folder,) = copies(home)
    direct = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )  # fmt: skip
    copied = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    assert direct.state_dict().keys() == copied.state_dict().keys()
    for name, weight in direct.state_dict().items():
        assert weight.dtype == copied.state_dict()[name].dtype == getattr(torch, dtype)
        assert torch.equal(weight, copied.state_dict()[name]), name
    assert copied.generation_config.eos_token_id == direct.generation_config.eos_token_id
    del conversions[:]
    assert torch.equal(load(gguf_file, dtype), first)
    assert conversions == []


def test_a_copied_tokenizer_does_what_the_files_tokenizer_does(gguf_file, conversions):
    first, second = (load_chat_tokenizer(str(gguf_file)) for _ in range(2))
    assert conversions == ["AutoTokenizer"]
    assert type(first) is type(second)
    assert first.get_vocab() == second.get_vocab()
    assert first.special_tokens_map == second.special_tokens_map
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    messages = [{"role": "user", "content": "the other\n\n the  <|im_end|>!"}]
    assert render_prompt(first, messages) == render_prompt(second, messages)
    for text in ("the  thethe <|im_start|>x", " a\n", ""):
        ids = first(text)["input_ids"]
        assert ids == second(text)["input_ids"]
        assert first.decode(ids) == second.decode(ids)
        assert first.decode(ids, skip_special_tokens=True) == second.decode(ids, skip_special_tokens=True)


def test_a_copy_belongs_to_the_content_the_dtype_and_the_version(gguf_file, home, conversions, tmp_path, monkeypatch):
    load(gguf_file)
    moved = tmp_path / "moved" / gguf_file.name
    moved.parent.mkdir()
    moved.write_bytes(gguf_file.read_bytes())
    os.utime(moved, (0, 0))
    load(moved)
    assert len(conversions) == len(copies(home)) == 1
    load(gguf_file, "bfloat16")
    content = bytearray(gguf_file.read_bytes())
    content[-1] ^= 1  # the last weight
    moved.write_bytes(content)
    load(moved)
    monkeypatch.setattr(gguf_copy.transformers, "__version__", "6.0.0")
    load(gguf_file)
    assert len(conversions) == len(copies(home)) == 4


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def scramble_header(path):
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 8 + content[8:])


DAMAGES = {
    "weights cut off": lambda folder: truncate(folder / "model.safetensors"),
    "weights scrambled": lambda folder: scramble_header(folder / "model.safetensors"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no end": lambda folder: (folder / "copy.json").unlink(),
    "end cut off": lambda folder: truncate(folder / "copy.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_made_again(gguf_file, home, conversions, damage):
    first = load(gguf_file)
    (folder,) = copies(home)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGES[damage](folder)
    assert torch.equal(load(gguf_file), first)
    assert len(conversions) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    load(gguf_file)
    assert len(conversions) == 2


def test_where_no_copy_can_be_written_loading_works_all_the_same(gguf_file, home, conversions, capsys):
    home.parent.write_text("a file, so no folder can be made in it")
    assert torch.equal(load(gguf_file), load(gguf_file))
    assert len(conversions) == 2
    assert load_chat_tokenizer(str(gguf_file)).chat_template == CHATML
    assert "kept" not in capsys.readouterr().err


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.rename"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failure_while_a_copy_is_written_leaves_nothing_behind(gguf_file, home, monkeypatch, call, failure):
    def fail(*arguments):
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(call, fail)
        try:
            load(gguf_file)
        except KeyboardInterrupt:
            assert failure is KeyboardInterrupt
    assert list(home.iterdir()) == []
    load(gguf_file)
    assert len(copies(home)) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HOME": "/hub", "XDG_CACHE_HOME": "/xdg"}, "/hub/medusa-train"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/medusa-train"),
        ({"XDG_CACHE_HOME": ""}, str(Path.home() / ".cache" / "medusa-train")),
    ],
)
def test_copies_are_where_caches_belong(monkeypatch, variables, expected):
    monkeypatch.delenv("XDG_CACHE_HOME")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(gguf_copy.cache_folder()) == expected
