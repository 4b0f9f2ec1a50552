"""How long a training step takes on this device, measured without a cache, and without rows."""

from __future__ import annotations

import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_train.data.dataset import HeadsDataset
from medusa_train.data.hidden_states import Shard
from medusa_train.data.packing import PackedRows
from medusa_train.data.rows import Row
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import MOST_COPIED, HeadsConfig
from medusa_train.joint import JointHeads
from medusa_train.losses import LossWeights
from medusa_train.online import OnlineHeads
from medusa_train.recipe import Recipe
from medusa_train.trainer import HeadsForTraining

TIMED_STEPS, TIMING_SECONDS = 5, 10.0


def time_training_step(recipe: Recipe, config: HeadsConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Median seconds of an optimizer step on heads of this shape, from random hidden states.

    Batches go the way of the train stage: dataset, loss, backward pass, clipping, AdamW. A stand-in without layers has
    the projection and the embeddings that the loss reads of a backbone.
    """
    training = recipe.training
    torch.manual_seed(recipe.seed)
    stand_in = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=1,
            num_hidden_layers=0,
            num_attention_heads=1,
            tie_word_embeddings=True,
            initializer_range=0.02,
        )
    )
    backbone = Backbone(stand_in.to(device, dtype).eval().requires_grad_(False), "", ())
    heads = MedusaHeads.for_backbone(backbone, config)
    module = HeadsForTraining(heads, backbone, LossWeights.of(recipe.training)).to(device)
    positions = 2 * training.per_device_train_batch_size + config.num_heads
    shard = Shard(
        torch.randn(positions, config.hidden_size, dtype=torch.bfloat16),
        torch.randint(config.projection_size, (positions,)),
        torch.full((positions,), positions),
        torch.randint(config.projection_size, (positions, MOST_COPIED), dtype=torch.int32),
    )
    dataset = HeadsDataset([shard], config.num_heads)
    return _time(recipe, module, dataset, dtype, training.gradient_accumulation_steps)


def time_online_step(recipe: Recipe, config: HeadsConfig, backbone: Backbone) -> float:
    """Median seconds of an optimizer step with the backbone in the loop, from full packs of random tokens.

    With ``lora`` it is a step after the warm-up, and the backbone keeps a fresh adapter.
    """
    training = recipe.training
    torch.manual_seed(recipe.seed)
    heads, weights = MedusaHeads.for_backbone(backbone, config), LossWeights.of(recipe.training)
    module: OnlineHeads
    if recipe.lora:
        module = JointHeads(heads, backbone, weights, recipe.lora)
        module.warming_up = False
    else:
        module = OnlineHeads(heads, backbone, weights)
    tokens = min(training.pack_tokens, backbone.max_positions or training.pack_tokens)
    texts = training.per_device_train_batch_size * (training.pack_tokens // tokens)
    ids = torch.randint(backbone.vocab_size, (texts, tokens)).tolist()
    rows = [Row(str(number), "train", [], row, [(1, tokens)], "") for number, row in enumerate(ids)]
    packs = PackedRows(rows, config.num_heads, training.pack_tokens, recipe.seed)
    # Passes of a backbone are long: one stands for all of a step.
    return training.gradient_accumulation_steps * _time(recipe, module.train(), packs, backbone.dtype, 1)


def _time(
    recipe: Recipe, module: HeadsForTraining, dataset: HeadsDataset | PackedRows, dtype: torch.dtype, passes: int
) -> float:
    training, device = recipe.training, next(module.parameters()).device
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, training.learning_rate, fused=True)
    seconds: list[float] = []
    while len(seconds) <= TIMED_STEPS and (len(seconds) < 2 or sum(seconds) < TIMING_SECONDS):
        start = time.perf_counter()
        for _ in range(passes):
            picked = torch.randint(len(dataset), (training.per_device_train_batch_size,)).tolist()
            samples = dataset.__getitems__(picked)
            batch = {name: tensor.to(device) for name, tensor in samples.items() if name != "index"}
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = module(**batch)["loss"]
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first one warms up
