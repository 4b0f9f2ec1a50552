"""Every shipped recipe trains heads for two steps on a tiny random model of its backbone's architecture."""

import json
import math
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from medusa_train.inference import MedusaModel, NoDrafter
from medusa_train.job import Job
from medusa_train.recipe import load_recipe
from medusa_train.stages import run_stages

RECIPES = Path(str(files("medusa_train.recipes")))
MODELS = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name != "accelerate")
BACKBONES = json.loads((RECIPES / "backbones.json").read_text())
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 512, "max_position_embeddings": 512,
    "image_size": 28, "patch_size": 14, "sliding_window": 8,
}  # fmt: skip


def shrunk(numbers):
    """A published config with small numbers where it has large ones."""
    return {
        key: shrunk(value) if isinstance(value, dict) else value if value is None else SMALL.get(key, value)
        for key, value in numbers.items()
    }


@pytest.fixture(scope="module")
def tiny_backbone(tmp_path_factory, tiny_chat_folder):
    """Source of a shipped recipe -> folder of a tiny random model of the same class, made once per architecture."""
    made = {}

    def make(source):
        numbers = shrunk(BACKBONES[source])
        if (key := json.dumps(numbers)) not in made:
            folder = tmp_path_factory.mktemp(numbers["model_type"])
            for file in tiny_chat_folder.glob("*token*"):
                shutil.copy(file, folder)
            shutil.copy(tiny_chat_folder / "chat_template.jinja", folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.bos_token = "<|im_start|>"
            tokenizer.save_pretrained(folder)
            config = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
            text = config.get_text_config()
            text.eos_token_id = text.pad_token_id = tokenizer.eos_token_id
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"what is {number} ?"}) + "\n" for number in range(16)))
    return path


def test_every_backbone_of_a_recipe_has_its_sizes_published_with_it():
    assert {load_recipe(path).backbone.source for path in MODELS} == set(BACKBONES)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_two_steps_of_training(path, tiny_backbone, prompts, tmp_path):
    real = load_recipe(path)
    template = real.backbone.chat_template
    recipe = load_recipe(
        path,
        [
            f"output_dir={tmp_path}", f"backbone.source={tiny_backbone(real.backbone.source)}",
            "backbone.dtype=float32", "backbone.device=cpu", "backbone.quantization=null",
            f"backbone.chat_template={RECIPES.parent / template if template else 'null'}",
            f"heads.draft_vocab_size={64 if real.heads.draft_vocab_size else 0}",
            f"data.prompts={prompts}", "data.num_prompts=null", "data.max_new_tokens=8", "data.batch_size=16",
            "data.calibration_share=0.2", "data.heldout_share=0.2",
            "training.per_device_train_batch_size=4096", "training.gradient_accumulation_steps=1",
            "training.num_train_epochs=2", "training.save_steps=2", "training.logging_steps=1",
            "training.eval_positions=16",
            *(["lora.warmup_steps=1"] if real.lora else []),
        ],
    )  # fmt: skip
    job = Job(recipe)
    run_stages(job, "train", overwrite=False)
    result = job.folder.result("train")["result"]
    assert result["optimizer_steps"] == 2
    assert math.isfinite(result["last_loss"])
    model = MedusaModel.from_pretrained(job.folder.heads, dtype="float32")
    assert model.heads.config.kind == real.heads.kind
    assert (job.folder.heads / "adapter").exists() == (real.lora is not None)
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6)
    plain = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, drafter=NoDrafter())
    assert out.new_tokens == plain.new_tokens
