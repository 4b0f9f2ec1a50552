"""Estimates from sizes: against numbers worked out by hand, and against the models that the sizes are of."""

import pytest
import torch
from transformers import AutoConfig

from medusa_train.estimate import Accelerator, Shape, heads_config, needs, published_config, shape_of, weight_bytes
from medusa_train.preflight import cache_bytes, checkpoint_bytes, count_parameters, training_memory
from medusa_train.recipe import Recipe

SHAPE = Shape(1000, 2, 8, 64, 16, 512)
# Shares of the peaks are 0.4 and 0.6: 1 operation and 1 byte a second are left.
SLOW = Accelerator("slow", 1 / 0.4, 1 / 0.6)
FAST = Accelerator("fast", 1e30, 1e30)


def recipe(**sections):
    data = {"num_prompts": 100, "max_new_tokens": 10, "batch_size": 5, "calibration_share": 0.1, "heldout_share": 0.1}
    return Recipe(
        output_dir="out", backbone={"source": "m"}, heads={"draft_vocab_size": 16},
        data=data | sections.pop("data", {}), **sections,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "billions"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.1345),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.711),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.030),
        ("Qwen/Qwen3-0.6B", 0.596),
        ("Qwen/Qwen3-8B", 8.191),
        ("Qwen/Qwen3-32B", 32.76),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.248),
        ("microsoft/phi-4", 14.66),
        ("lmsys/vicuna-7b-v1.5", 6.738),
    ],
)
def test_published_sizes_give_the_published_number_of_parameters(source, billions):
    assert shape_of(published_config(source)).parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_no_sizes_are_made_up_for_a_model_without_a_recipe():
    assert published_config("someone/else") is None


def test_the_shape_is_that_of_the_config():
    config = AutoConfig.for_model(
        "qwen3", hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, vocab_size=80, max_position_embeddings=99, tie_word_embeddings=True,
    )  # fmt: skip
    shape = shape_of(config)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_positions) == (3, 32, 80, 99)
    assert shape.cache_width == 3 * 2 * 2 * 12


def test_memory_and_disk_are_the_sums_of_the_preflight():
    plan = recipe(training={"per_device_train_batch_size": 7})
    need, config = needs(plan, SHAPE), heads_config(plan, 8, 64)
    assert need.distill_bytes == 2 * 1000 + 2 * 16 * 5 * (256 + 10)
    assert need.train_bytes == 2 * 1000 + training_memory(config, 7).total_estimate
    states = cache_bytes(1000, 8)
    assert need.disk_bytes == max(2 * states, states + checkpoint_bytes(config))


def test_online_keeps_no_states_of_the_training_split_and_trains_on_whole_packs():
    plan = recipe(training={"mode": "online", "pack_tokens": 64})
    need, config = needs(plan, SHAPE), heads_config(plan, 8, 64)
    assert need.disk_bytes == cache_bytes(200, 8) + checkpoint_bytes(config)
    assert need.train_bytes == 2 * 1000 + training_memory(config, 64).total_estimate


def test_training_costs_six_operations_a_weight_and_position():
    plan = recipe(training={"num_train_epochs": 2, "per_device_train_batch_size": 800})
    weights = count_parameters(heads_config(plan, 8, 64))
    computed = needs(plan, SHAPE, Accelerator("computes", 1 / 0.4, 1e30))
    assert computed.train_seconds == pytest.approx(800 * 2 * 6 * weights)
    moved = needs(plan, SHAPE, Accelerator("moves", 1e30, 1 / 0.6))
    assert moved.train_seconds == pytest.approx(2 * 28 * weights)  # one batch an epoch


def test_online_training_adds_the_passes_of_the_backbone():
    def seconds(**sections):
        plan = recipe(**sections)
        return needs(plan, SHAPE, SLOW).train_seconds

    pack = {"pack_tokens": 800, "num_train_epochs": 1}
    cached = seconds(training={"num_train_epochs": 1, "per_device_train_batch_size": 800})
    online = seconds(training={"mode": "online", **pack})
    joint = seconds(training={"mode": "online", **pack}, lora={})
    assert online - cached == pytest.approx(800 * 2 * 1000)
    assert joint - cached == pytest.approx(800 * 8 * 1000)


def test_answers_take_a_pass_per_token_of_a_batch():
    assert needs(recipe(), SHAPE, FAST).distill_seconds == pytest.approx(1000 / 5 * 2 * 1e-3)  # layers are launched
    need = needs(recipe(), SHAPE, Accelerator("computes", 1 / 0.4, 1e30))
    assert need.distill_seconds == pytest.approx(1000 / 5 * 2 * 1000 * 5)
    assert needs(recipe(data={"conversations": "file.jsonl"}), SHAPE).distill_seconds == 0


def test_a_budget_of_answer_tokens_is_kept_up_to_a_batch():
    need = needs(recipe(data={"answer_tokens": 300}), SHAPE, FAST)
    assert need.distill_seconds == pytest.approx((300 + 5 * 10) / 5 * 2e-3)


def test_without_a_number_of_prompts_only_memory_is_known():
    need = needs(recipe(data={"num_prompts": None}), SHAPE)
    assert (need.disk_bytes, need.distill_seconds, need.train_seconds) == (None, None, None)
    assert need.distill_bytes == needs(recipe(), SHAPE).distill_bytes


def test_weights_take_their_width():
    widths = [weight_bytes(10, name, torch.bfloat16) for name in (None, "8bit", "4bit")]
    assert widths == [20, 10, 5]
    assert weight_bytes(10, None, torch.float32) == 40
