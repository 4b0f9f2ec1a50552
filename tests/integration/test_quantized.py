"""Backbones in 8 and 4 bits (bitsandbytes): decoded exactly, trained on, and adapted beside their packed weights.

In 8 bits a pass rounds its tokens together (columns that hold an outlier of *any* token are multiplied apart, Dettmers
et al. 2022, "LLM.int8()", section 3.2), so there decoding is exact up to that rounding only.
"""

import importlib.util
import json

import pytest
import torch
import yaml

from conftest import make_llama, random_heads, save_tiny_chat
from medusa_train.inference import HeadsConfig, MedusaHeads, MedusaModel, Tree, UserError, load_backbone
from medusa_train.inference.adapter import Adapter
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import save_heads
from medusa_train.inference.drafters import NoDrafter
from medusa_train.job import Job
from medusa_train.recipe import load_recipe
from medusa_train.stages import run_stages

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

SIZES = ("8bit", "4bit")
PROMPTS = torch.tensor([[1, 5, 9, 33, 20], [7, 7, 2, 60, 8]])
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return folder


def quantized(folder, bits, adapter=None):
    return load_backbone(str(folder), "float32", "cpu", bits, adapter=adapter)


def test_greedy_decoding_in_4_bits_with_a_tree_is_plain_greedy_decoding(folder):
    backbone = quantized(folder, "4bit")
    assert any(parameter.dtype == torch.uint8 for parameter in backbone.model.parameters())
    model = MedusaModel(backbone, random_heads(64), TREE)
    wanted = backbone.model.generate(PROMPTS, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert model.generate(PROMPTS, max_new_tokens=20).sequences.tolist() == wanted.tolist()
    assert model.generate(PROMPTS, max_new_tokens=20, drafter=NoDrafter()).sequences.tolist() == wanted.tolist()


def test_greedy_decoding_in_8_bits_with_a_tree_is_greedy_up_to_rounding(folder):
    backbone = quantized(folder, "8bit")
    assert any(parameter.dtype == torch.int8 for parameter in backbone.model.parameters())
    out = MedusaModel(backbone, random_heads(64), TREE).generate(PROMPTS, max_new_tokens=20)
    with torch.inference_mode():
        logits = backbone.model(out.sequences).logits[:, PROMPTS.shape[1] - 1 : -1]
    emitted = out.sequences[:, PROMPTS.shape[1] :]
    below = logits.amax(dim=-1) - logits.gather(2, emitted[..., None])[..., 0]
    assert float(below.max()) < 0.1 * float(logits.std())
    assert float((logits.amax(dim=-1) - logits.median(dim=-1).values).min()) > float(logits.std())  # any token is not


@pytest.mark.parametrize("bits", SIZES)
def test_fresh_heads_say_what_the_backbone_says(folder, bits):
    backbone = quantized(folder, bits)
    heads = MedusaHeads.for_backbone(backbone, HeadsConfig(2, 1, 64, 64))
    with torch.inference_mode():
        hidden = backbone.hidden_states(torch.tensor([[1, 2, 3]]))
        torch.testing.assert_close(heads(hidden, 1), backbone.logits(hidden))


@pytest.mark.parametrize("bits", SIZES)
def test_an_adapter_stays_beside_quantized_weights(folder, bits, tmp_path):
    backbone = quantized(folder, bits)
    before = {name: parameter.clone() for name, parameter in backbone.model.named_parameters()}
    lora = Adapter.put_on(backbone.model, 4, 8, 0.0, "all-linear")
    with torch.no_grad():
        for parameter in lora.parameters().values():
            parameter.normal_(std=0.2)
    ids = torch.tensor([[1, 5, 9, 33, 20]])
    with torch.inference_mode():
        wanted = backbone.model(ids).logits
    lora.save(tmp_path / "heads" / "adapter", str(folder))
    save_heads(tmp_path / "heads", random_heads(64), Backbone.wrap(backbone.model), adapted=True)

    model = MedusaModel.from_pretrained(tmp_path / "heads", str(folder), "float32", "cpu", bits)
    with torch.inference_mode():
        assert torch.equal(model.backbone.model(ids).logits, wanted)
        assert not torch.allclose(quantized(folder, bits).model(ids).logits, wanted, atol=0.1)
    weights = {
        name.replace(".base_layer", ""): parameter
        for name, parameter in model.backbone.model.named_parameters()
        if "lora_" not in name
    }
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_gradients_pass_through_packed_weights_after_a_pass_without(folder):
    backbone = load_backbone(str(folder), "float32", "cpu", "4bit", trainable=True)
    weights = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(2))

    def outcome(embedded):
        return (backbone.model(inputs_embeds=embedded).logits * weights).sum()

    embedded = backbone.embed(PROMPTS[:1]).detach().requires_grad_()
    outcome(embedded).backward()
    direction = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ahead, behind = (outcome(embedded + step * direction) for step in (1e-3, -1e-3))
    assert float((embedded.grad * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-3, rel=0.02)


def test_qlora_from_prompts_to_report(tmp_path):
    # Where a CPU has bf16 instructions, bitsandbytes packs 4-bit weights in blocks of 64 columns.
    backbone = save_tiny_chat(tmp_path / "backbone", hidden_size=64, intermediate_size=128)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is the cat {i} ?"}) + "\n" for i in range(24)))
    recipe = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(backbone), "dtype": "float32", "device": "cpu", "quantization": "4bit"},
        "heads": {"num_heads": 2, "draft_vocab_size": 128},
        "data": {
            "prompts": str(prompts), "num_prompts": None, "max_new_tokens": 10, "batch_size": 8,
            "calibration_share": 0.2, "heldout_share": 0.2,
        },
        "training": {
            "mode": "online", "pack_tokens": 96, "num_train_epochs": 2, "load_best_model_at_end": False,
            "learning_rate": 0.02, "eval_steps": 0,
        },
        "lora": {"r": 4, "warmup_steps": 1},
        "inference": {"tree_sizes": [1, 4], "step_time_rounds": 1, "step_time_steps": 2},
        "eval": {"num_prompts": 2, "max_new_tokens": 6, "repeats": 1},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    job = Job(load_recipe(path))
    run_stages(job, "eval")
    assert job.folder.result("train")["result"]["kl_to_base"] > 0
    report = json.loads((job.folder.path / "report.json").read_text())
    assert report["losslessness"]["over_plain"]["identical_share"] == 1
    layers = job.decoding_backbone.model.state_dict().keys()
    assert any("lora_A" in name for name in layers)
    assert any("quant_state" in name for name in layers)


def test_quantization_of_a_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"a GGUF file is loaded whole; remove backbone\.quantization"):
        load_backbone(str(tmp_path / "model.gguf"), "float32", "cpu", "4bit")
