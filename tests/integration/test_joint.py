"""Medusa-2: heads and a LoRA adapter of the backbone, trained together, saved, loaded and merged."""

import json
import math

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config, TrainingArguments

import medusa_train.trainer
from conftest import SHAPING_CONFIGS, make_llama, make_shaping_model
from medusa_train.data.dataset import IGNORED, HeadsDataset
from medusa_train.data.hidden_states import read_cache
from medusa_train.data.packing import PackedRows, row_labels
from medusa_train.data.rows import Row, read_rows
from medusa_train.eval.drift import measure_drift
from medusa_train.formats import export_heads
from medusa_train.inference import HeadsConfig, MedusaHeads, MedusaModel, UserError, load_backbone
from medusa_train.inference.adapter import Adapter
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import save_heads
from medusa_train.inference.drafters import NoDrafter
from medusa_train.job import Job
from medusa_train.joint import HEADS_RATE, JointHeads, JointTrainer, answer_places, heads_weight, summed_divergence
from medusa_train.losses import LossWeights
from medusa_train.online import OnlineHeads
from medusa_train.recipe import LoraSection, load_recipe
from medusa_train.stages import run_stages

VOCABULARY, HEADS = 64, 3


def random_rows(count):
    generator = torch.Generator().manual_seed(0)
    return [
        Row(str(i), "train", [], torch.randint(0, VOCABULARY, (9 + i,), generator=generator).tolist(), [(3, 9 + i)], "")
        for i in range(count)
    ]


def joint_heads(kind="medusa", lm_head="own", warmup=0.5, base=None):
    """Fresh heads, moved a little, and a fresh adapter."""
    backbone = Backbone.wrap(base or make_llama(vocab_size=VOCABULARY))
    config = HeadsConfig(HEADS, 1, backbone.hidden_size, VOCABULARY, 40, kind=kind, lm_head=lm_head)
    heads = MedusaHeads.for_backbone(backbone, config, torch.arange(40) + 7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    torch.manual_seed(2)
    section = LoraSection(r=4, alpha=8, dropout=0.0, warmup_steps=warmup)
    return JointHeads(heads, backbone, LossWeights(scale=0.5), section).train()


def move_adapter(adapter, scale=0.05):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def batch_of(rows):
    dataset = PackedRows(rows, HEADS, 48, seed=0)
    batch = dataset.__getitems__(range(len(dataset)))
    del batch["index"]
    return batch


@given(st.integers(1, 200), st.data(), st.sampled_from(["sine", "linear"]))
def test_the_heads_warm_up_alone_and_then_count_more_with_every_step(steps, data, ramp):
    warmup = data.draw(st.integers(0, steps - 1))
    weights = [heads_weight(step, steps, warmup, ramp) for step in range(steps)]
    assert weights[:warmup] == [1.0] * warmup
    assert weights[-1] == pytest.approx(1.0)
    assert 0 < weights[warmup] <= math.pi / 2 / (steps - warmup)
    assert all(a < b for a, b in zip(weights[warmup:], weights[warmup + 1 :], strict=False))


def test_the_backbone_is_held_at_every_token_of_an_answer():
    row = Row("", "train", [], list(range(12)), [(2, 5), (7, 12)], "")
    places = answer_places(row_labels(row, HEADS)[None])[0].nonzero()[:, 0].tolist()
    assert places == [1, 2, 3, 6, 7, 8, 9, 10]


def test_the_divergence_is_the_kl_of_whole_distributions_however_it_is_cut():
    frozen, adapted = torch.randn(2, 11, 8, dtype=torch.float64)
    adapted.requires_grad_()
    projection = torch.randn(20, 8, dtype=torch.float64)
    p, q = (functional.linear(states, projection).softmax(-1) for states in (frozen, adapted))
    expected = (p * (p / q).log()).sum()
    for chunk in (4, 11, 100):
        found = summed_divergence(frozen, adapted, lambda states: functional.linear(states, projection), chunk)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    wanted, got = (torch.autograd.grad(value, adapted)[0] for value in (expected, found))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "lm_head"), [("medusa", "own"), ("hydra", "shared")])
def test_heads_with_their_biases_and_the_adapter_have_a_learning_rate_each(tmp_path, kind, lm_head):
    model = joint_heads(kind, lm_head)
    arguments = TrainingArguments(
        str(tmp_path), learning_rate=1e-3, weight_decay=0.1, use_cpu=True, remove_unused_columns=False
    )
    trainer = JointTrainer(model, model.backbone, PackedRows(random_rows(3), HEADS, 48, 0), None, arguments)
    heads, adapter = trainer.create_optimizer().param_groups
    assert (heads["lr"], adapter["lr"]) == (1e-3, 1e-3 / HEADS_RATE)
    assert (heads["weight_decay"], adapter["weight_decay"]) == (0.1, 0.1)
    assert {id(p) for p in heads["params"]} == {id(p) for p in model.heads.heads.parameters()}
    assert any(name.endswith("bias") for name, _ in model.heads.heads.named_parameters())
    loras = {id(p) for name, p in model.backbone.model.named_parameters() if "lora_" in name}
    assert {id(p) for p in adapter["params"]} == loras
    assert len(loras) == 2 * 2 * 7  # A and B, two layers, seven matrices in each


def test_frozen_weights_are_neither_trained_nor_saved():
    model = joint_heads()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in model.state_dict() if name not in trained} == {"heads.draft_token_ids"}
    assert all(name.startswith("heads.") or "lora_" in name for name in trained)
    frozen = [parameter for name, parameter in model.backbone.model.named_parameters() if "lora_" not in name]
    assert not any(parameter.requires_grad for parameter in frozen)


def test_while_heads_warm_up_training_is_that_of_heads_alone():
    rows = random_rows(5)
    model = joint_heads()
    model.begin_step(4, 10)
    ours = model(**batch_of(rows))
    ours["loss"].backward()
    alone = OnlineHeads(model.heads, Backbone.wrap(make_llama(vocab_size=VOCABULARY)), model.weights)
    theirs = alone(**batch_of(rows))
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-3, atol=0)  # online training rounds its states
    assert ours["divergence"].tolist() == [0, 0]
    assert all(parameter.grad is None for parameter in model.adapter.values())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.heads.parameters())


def test_the_joint_loss_is_that_of_the_formula_and_reaches_the_adapter():
    rows = random_rows(5)
    model = joint_heads(warmup=0)
    move_adapter(model.lora)
    model.begin_step(2, 8)
    out = model(**batch_of(rows))
    base = make_llama(vocab_size=VOCABULARY)
    adapted = model.backbone.model
    heads_loss, divergence, positions = 0.0, 0.0, 0
    for row in rows:
        ids = torch.tensor(row.input_ids)
        theirs, ours = (run(ids[None]).logits[0].log_softmax(-1) for run in (base, adapted))
        states = adapted.model(ids[None])[0][0]
        start, end = row.spans[0]
        divergence += functional.kl_div(ours, theirs, log_target=True, reduction="none")[start - 1 : end - 1].sum()
        for head in range(HEADS):
            for place in range(start - 1, end - 2 - head):
                positions += 1
                logits = model.heads(states[place], head).log_softmax(-1)
                teacher = base(ids[None]).logits[0, place + 1 + head, 7:47].softmax(-1)
                soft, column = functional.kl_div(logits, teacher, reduction="sum"), int(ids[place + 2 + head]) - 7
                hard = -logits[column] if 0 <= column < 40 else 0.0
                heads_loss += 0.5 * 0.8**head * 0.5 * (soft + hard)
    wanted = (math.sin(3 / 8 * math.pi / 2) * heads_loss + divergence) / (positions / HEADS)
    torch.testing.assert_close(out["loss"], wanted, rtol=1e-4, atol=0)
    torch.testing.assert_close(out["divergence"][0], divergence, rtol=1e-4, atol=0)
    out["loss"].backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.requires_grad)
    assert all(p.grad is None for name, p in model.backbone.model.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("name", SHAPING_CONFIGS)
def test_the_backbone_is_held_by_its_scaled_or_capped_logits(name):
    model = joint_heads(warmup=0, base=make_shaping_model(name))
    move_adapter(model.lora)
    model.begin_step(2, 8)
    (row,) = rows = random_rows(1)
    out, ids = model(**batch_of(rows)), torch.tensor([row.input_ids])
    with torch.no_grad():
        theirs, ours = (run(ids).logits[0].log_softmax(-1) for run in (make_shaping_model(name), model.backbone.model))
    start, end = row.spans[0]
    wanted = functional.kl_div(ours, theirs, log_target=True, reduction="none")[start - 1 : end - 1].sum()
    torch.testing.assert_close(out["divergence"][0], wanted, rtol=1e-3, atol=0)


def test_a_batch_in_parts_has_the_same_gradient_and_one_without_answers_none():
    batch = batch_of(random_rows(8))
    items = (batch["labels"] != IGNORED).sum()
    gradients = []
    for parts in (1, len(batch["labels"])):
        model = joint_heads(warmup=0)
        move_adapter(model.lora)
        for part in range(parts):
            model(items, **{name: tensor.tensor_split(parts)[part] for name, tensor in batch.items()})[
                "loss"
            ].backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    for whole, summed in zip(*gradients, strict=True):
        torch.testing.assert_close(summed, whole, rtol=1e-3, atol=1e-6)
    model.zero_grad()
    batch["labels"].fill_(IGNORED)
    out = model(**batch)
    out["loss"].backward()
    assert out["loss"] == 0
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.adapter.values())


def test_dropout_is_on_in_training_only():
    model = joint_heads(warmup=0)
    for layer in model.lora.model.modules():
        if hasattr(layer, "lora_dropout"):
            layer.lora_dropout["default"] = torch.nn.Dropout(0.5)
    move_adapter(model.lora)
    batch = batch_of(random_rows(3))
    model.train()
    assert model(**batch)["loss"] != model(**batch)["loss"]
    shards = [model.shards(random_rows(3), 64)[0] for _ in range(2)]
    assert torch.equal(shards[0].hidden, shards[1].hidden)
    assert model(**batch)["loss"] != model(**batch)["loss"]  # and on again
    model.eval()
    assert model(**batch)["loss"] == model(**batch)["loss"]
    assert not model.backbone.model.training


def test_drift_is_zero_for_a_fresh_adapter_and_that_of_the_model_for_a_trained_one():
    model = joint_heads().eval()
    rows = random_rows(3)
    fresh = measure_drift(model.backbone, model.lora.off, rows)
    assert fresh["kl_to_base"] == pytest.approx(0, abs=1e-9)
    assert fresh["perplexity_drift"] == pytest.approx(0, abs=1e-9)
    move_adapter(model.lora)
    drift = measure_drift(model.backbone, model.lora.off, rows)
    base = make_llama(vocab_size=VOCABULARY)
    losses = [
        sum(
            functional.cross_entropy(
                run(torch.tensor([row.input_ids])).logits[0, 2:-1], torch.tensor(row.input_ids[3:]), reduction="sum"
            ).item()
            for row in rows
        )
        / sum(row.learnt_tokens for row in rows)
        for run in (base, model.backbone.model)
    ]
    assert drift["base_perplexity"] == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert drift["adapted_perplexity"] == pytest.approx(math.exp(losses[1]), rel=1e-4)
    assert drift["perplexity_drift"] == pytest.approx(math.exp(losses[1] - losses[0]) - 1, rel=1e-3)
    texts = [torch.tensor([row.input_ids]) for row in rows]
    before, after = (
        torch.cat([run(text).logits[0, 2:-1].log_softmax(-1) for text in texts]) for run in (base, model.backbone.model)
    )
    expected = (before.exp() * (before - after)).sum(dim=-1).mean().item()  # what was, as the base says, against now
    assert drift["kl_to_base"] == pytest.approx(expected, rel=1e-3)
    assert drift["kl_to_base"] > 0.01


def test_half_precision_trains_an_adapter_in_full_precision():
    backbone = Backbone.wrap(make_llama(vocab_size=VOCABULARY).bfloat16())
    heads = MedusaHeads.for_backbone(backbone, HeadsConfig(HEADS, 1, backbone.hidden_size, VOCABULARY))
    model = JointHeads(heads, backbone, LossWeights(), LoraSection(r=4, dropout=0.0, warmup_steps=0)).train()
    move_adapter(model.lora)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch_of(random_rows(4)))["loss"].backward()
    assert {parameter.dtype for parameter in model.adapter.values()} == {torch.float32}
    for parameter in model.parameters():
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.abs().sum() > 0


def folder_with_adapter(folder, base):
    """The base in ``folder/base``, an adapter in ``folder/heads/adapter``; the base has it on afterwards."""
    base.save_pretrained(folder / "base")
    adapter = Adapter.put_on(base, 4, 8, 0.0, "all-linear")
    move_adapter(adapter)
    adapter.save(folder / "heads" / "adapter", str(folder / "base"))
    return folder, base


@pytest.fixture
def tied(tmp_path):
    """A folder with a base whose embeddings are tied and its adapter, and the model with the adapter on."""
    return folder_with_adapter(tmp_path, make_llama(vocab_size=VOCABULARY, tie_word_embeddings=True))


def test_layers_that_keep_their_weights_transposed_are_adapted_too(tmp_path):
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    folder, adapted = folder_with_adapter(tmp_path, AutoModelForCausalLM.from_config(config).eval())
    ids = torch.randint(0, VOCABULARY, (2, 9))
    merged = load_backbone(str(folder / "base"), "float32", "cpu", adapter=folder / "heads" / "adapter").model
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_merges_into_a_tied_base(tied):
    folder, adapted = tied
    ids = torch.randint(0, VOCABULARY, (2, 9))
    wanted = adapted(ids).logits
    assert sorted(path.name for path in (folder / "heads" / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    merged = load_backbone(
        str(folder / "base"), "float32", "cpu", adapter=folder / "heads" / "adapter", trainable=True
    ).model
    merged.save_pretrained(folder / "merged")
    again = AutoModelForCausalLM.from_pretrained(folder / "merged")
    torch.testing.assert_close(again(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert not torch.allclose(base(ids).logits, wanted, atol=0.1)
    assert torch.equal(base.get_output_embeddings().weight, again.get_output_embeddings().weight)
    theirs = PeftModel.from_pretrained(base, folder / "heads" / "adapter")
    torch.testing.assert_close(theirs(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-5)


def test_heads_bring_their_adapter_along(tied):
    folder, adapted = tied
    ids = torch.randint(0, VOCABULARY, (1, 9))
    wanted = adapted(ids).logits
    backbone = Backbone.wrap(adapted, str(folder / "base"))
    heads = MedusaHeads(HeadsConfig(HEADS, 1, backbone.hidden_size, VOCABULARY))
    save_heads(folder / "heads", heads, backbone, adapted=True)
    model = MedusaModel.from_pretrained(folder / "heads", dtype="float32", device="cpu")
    torch.testing.assert_close(model.backbone.model(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    out = model.generate(ids, max_new_tokens=12)
    assert out.sequences.tolist() == adapted.generate(ids, max_new_tokens=12, do_sample=False).tolist()
    with pytest.raises(UserError, match=r"merge it \(recipes/README.md, Medusa-2\)"):
        export_heads(folder / "heads", folder / "out", "vllm")
    (folder / "heads" / "adapter" / "adapter_model.safetensors").rename(folder / "heads" / "adapter_model.bin")
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors; adapters in other files are not read"):
        MedusaModel.from_pretrained(folder / "heads", dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dora": True}, "use_dora=True; only plain LoRA"),
        ({"megatron_config": {"x": 1}}, "megatron_config="),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"target_modules": ".*"}, "target_modules='.*' is no list"),
        ({"target_modules": ["nowhere"]}, "LoRA cannot be put on LlamaForCausalLM"),
        ({"target_modules": ["lm_head"]}, "output projection"),
        ({"r": 3}, "is \\(4, 64\\), LlamaForCausalLM needs \\(3, 64\\)"),
        ({"r": "many"}, "not the config of a LoRA adapter"),
    ],
)
def test_other_adapters_are_refused(tied, change, told):
    folder, _ = tied
    path = folder / "heads" / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=told):
        load_backbone(str(folder / "base"), "float32", "cpu", adapter=path.parent)


def test_an_adapter_without_some_layer_is_refused(tied):
    folder, _ = tied
    path = folder / "heads" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file(tensors, path)
    with pytest.raises(UserError, match=f"tensor {gone} is None"):
        load_backbone(str(folder / "base"), "float32", "cpu", adapter=path.parent)


@pytest.fixture
def recipe_file(tmp_path, tiny_chat_folder):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is the cat {i} ?"}) + "\n" for i in range(30)))
    recipe = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"num_heads": 2, "draft_vocab_size": 128},
        "data": {
            "prompts": str(prompts), "num_prompts": None, "max_new_tokens": 10, "batch_size": 8,
            "calibration_share": 0.2, "heldout_share": 0.2,
        },
        "training": {
            "mode": "online", "pack_tokens": 96, "num_train_epochs": 3, "save_steps": 4, "logging_steps": 4,
            "load_best_model_at_end": False,
        },
        "lora": {"r": 4, "dropout": 0.1, "warmup_steps": 3},
        "inference": {"tree_sizes": [1, 4], "step_time_rounds": 1, "step_time_steps": 2},
        "eval": {"num_prompts": 2, "max_new_tokens": 6, "repeats": 1},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it."""


def test_evaluation_in_the_loop_reads_what_the_adapted_backbone_computes(recipe_file, monkeypatch):
    seen, measured = [], []
    ranks_of, loss_of = medusa_train.trainer.token_ranks, JointHeads.loss_of

    def loss(self, heads, **batch):
        if not torch.is_grad_enabled():
            measured.append(batch)
        return loss_of(self, heads, **batch)

    monkeypatch.setattr(JointHeads, "loss_of", loss)
    monkeypatch.setattr(
        medusa_train.trainer, "token_ranks", lambda model, shards: seen.append(shards) or ranks_of(model, shards)
    )
    job = Job(load_recipe(recipe_file, ["lora.warmup_steps=4", "training.load_best_model_at_end=true"]))
    run_stages(job, "train")
    cached = torch.cat([shard.hidden for shard in read_cache(job.folder.stage("cache") / "calibration")])
    distances = [float((torch.cat([shard.hidden for shard in shards]) - cached).abs().max()) for shards in seen]
    assert distances[0] < 0.05  # after the warm-up: rounding
    assert distances[-1] > distances[0]
    each = len(measured) // len(seen)  # batches of one evaluation
    first, last = ({name: torch.cat([batch[name] for batch in part]) for name in ("hidden", "teacher_hidden")}
                   for part in (measured[:each], measured[-each:]))  # fmt: skip
    assert torch.equal(last["hidden"], HeadsDataset(seen[-1], 2).__getitems__(range(len(last["hidden"])))["hidden"])
    assert torch.equal(last["teacher_hidden"], first["teacher_hidden"])
    end = f"checkpoint-{job.folder.result('train')['result']['optimizer_steps']}"
    history = json.loads((job.folder.stage("train") / end / "trainer_state.json").read_text())
    (best,) = (entry for entry in history["log_history"] if entry["step"] == history["best_global_step"] and
               "eval_tokens_per_step" in entry)  # fmt: skip
    assert best["eval_tokens_per_step"] == job.folder.result("train")["result"]["best_tokens_per_step"]
    logs = [entry for entry in history["log_history"] if "heads_weight" in entry]
    assert logs[0]["heads_weight"] == 1
    assert "kl_to_base" not in logs[0]
    assert logs[-1]["kl_to_base"] > 0


def test_the_best_checkpoint_is_one_of_the_joint_training(recipe_file, monkeypatch):
    falling = iter(range(9, 0, -1))
    monkeypatch.setattr(medusa_train.trainer, "heads_quality", lambda *_: {"tokens_per_step": float(next(falling))})
    job = Job(load_recipe(recipe_file, ["lora.warmup_steps=4", "training.load_best_model_at_end=true"]))
    run_stages(job, "train")
    assert job.folder.result("train")["result"]["best_step"] == 8  # step 4 was better, and the warm-up's last


def test_a_whole_run_and_one_that_was_killed(recipe_file, monkeypatch):
    job = Job(load_recipe(recipe_file))
    run_stages(job, "eval")
    result = job.folder.result("train")["result"]
    assert result["optimizer_steps"] > 8
    assert result["kl_to_base"] > 0
    assert result["adapted_perplexity"] > 0
    report = json.loads((job.folder.path / "report.json").read_text())
    assert report["made"]["train"]["result"]["perplexity_drift"] == result["perplexity_drift"]
    assert report["losslessness"]["over_plain"]["identical_share"] == 1
    card = (job.folder.heads / "README.md").read_text()
    assert "that of the adapted backbone" in card
    assert "that of the backbone alone" not in card
    checkpoints = sorted(job.folder.stage("train").glob("checkpoint-*"))
    assert checkpoints
    assert not [name for name in load_file(checkpoints[-1] / "model.safetensors") if "base_layer" in name]

    # What trees and reports are made from is what the adapted model answers.
    model = MedusaModel.from_pretrained(job.folder.heads, dtype="float32", device="cpu")
    for split in ("calibration", "heldout"):
        rows = read_rows(job.folder.stage("tree") / f"{split}.jsonl")
        assert [row.id for row in rows] == [row.id for row in job.rows(split)]
        assert torch.cat([shard.tokens for shard in job.measured(split)]).tolist() == [
            token for row in rows for token in row.input_ids[row.spans[0][0] :]
        ]
        for row in rows[:2]:
            start, end = row.spans[0]
            prompt = torch.tensor([row.input_ids[:start]])
            assert (
                model.generate(prompt, max_new_tokens=10, drafter=NoDrafter()).new_tokens[0] == row.input_ids[start:end]
            )

    killed = Job(load_recipe(recipe_file, [f"output_dir={recipe_file.parent / 'killed'}"]))
    steps, step = iter(range(6)), torch.optim.AdamW.step

    def dying(*arguments, **keywords):
        if next(steps, None) is None:
            raise Killed
        return step(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", dying)
        with pytest.raises(Killed):
            run_stages(killed, "train")
    run_stages(Job(killed.recipe), "train")
    for name in ("medusa_lm_head.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = (load_file(j.folder.heads / name) for j in (killed, job))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert torch.equal(ours[key], tensor), key


def test_given_conversations_are_measured_as_they_are_with_the_adapted_states(recipe_file, tmp_path):
    talks = [
        {"messages": [{"role": "user", "content": f"what is {i} ?"}, {"role": "assistant", "content": "the cat sat"}]}
        for i in range(30)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    job = Job(load_recipe(recipe_file, [f"data.conversations={tmp_path / 'talks.jsonl'}", "lora.warmup_steps=0"]))
    run_stages(job, "tree")
    assert not list(job.folder.stage("tree").glob("*.jsonl"))
    for split in ("calibration", "heldout"):
        before, now = (
            {name: torch.cat([getattr(shard, name) for shard in shards]) for name in ("tokens", "hidden")}
            for shards in (read_cache(job.folder.stage("cache") / split), job.measured(split))
        )
        assert torch.equal(now["tokens"], before["tokens"])
        assert not torch.equal(now["hidden"], before["hidden"])


@pytest.mark.parametrize("launcher", ["DEEPSPEED", "FSDP"])
def test_launches_that_share_out_parameters_are_refused(recipe_file, monkeypatch, launcher):
    job = Job(load_recipe(recipe_file))
    run_stages(job, "cache")
    monkeypatch.setenv(f"ACCELERATE_USE_{launcher}", "true")
    with pytest.raises(UserError, match=r"launch with cpu\.yaml, ddp\.yaml"):
        run_stages(job, "train")
    assert not job.folder.stage("train").exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["training.mode=cached"], "set training.mode: online"),
        (["lora.rank=8"], "unknown key lora.rank"),
        (["lora.r=0"], "lora.r"),
    ],
)
def test_recipes_that_cannot_train_an_adapter(recipe_file, overrides, told):
    with pytest.raises(UserError, match=told) as error:
        load_recipe(recipe_file, overrides)
    assert "\n" not in str(error.value)
    assert load_recipe(recipe_file, ["lora=null"]).lora is None
    assert load_recipe(recipe_file, ["lora=null", "lora.r=8"]).lora.r == 8
