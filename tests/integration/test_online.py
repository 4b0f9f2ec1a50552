"""Training with the backbone in the loop gives what training from the cache gives."""

import json
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from conftest import KINDS, make_llama, reading
from medusa_train.data.dataset import IGNORED, HeadsDataset
from medusa_train.data.hidden_states import KeptStates, read_cache, shard_of, write_cache
from medusa_train.data.packing import PackedRows
from medusa_train.data.rows import Row
from medusa_train.inference import HeadsConfig, MedusaHeads, MedusaModel, Tree, UserError
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.drafters import Context
from medusa_train.job import Job
from medusa_train.losses import LossWeights
from medusa_train.online import OnlineHeads, states_ahead
from medusa_train.recipe import load_recipe
from medusa_train.stages import run_stages
from medusa_train.trainer import HeadsForTraining, whole_heads

VOCABULARY, HEADS = 64, 3


@pytest.fixture
def backbone():
    return Backbone.wrap(make_llama(vocab_size=VOCABULARY))


def random_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = 6 + 5 * i % 17
        few = 4 if i % 2 else VOCABULARY  # words of so few tokens come again
        ids = torch.randint(0, few, (length,), generator=generator).tolist()
        spans = [(0, length)] if i == 0 else [(2, 5), (6, length)] if i % 3 == 0 else [(3, length)]
        made.append(Row(str(i), "train", [], ids, spans, "stop"))
    return made


def training_module(kind, backbone, heads_kind="medusa"):
    """The same heads for every call: fresh ones, moved a little, over a part of the vocabulary."""
    config = HeadsConfig(HEADS, 2, backbone.hidden_size, VOCABULARY, 40, **reading(heads_kind))
    heads = MedusaHeads.for_backbone(backbone, config, torch.arange(0, 40) + 7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return kind(heads, backbone, LossWeights(soft_share=0.5)).train()


def batch_of(dataset):
    batch = dataset.__getitems__(range(len(dataset)))
    del batch["index"]
    return batch


@pytest.mark.parametrize("heads_kind", KINDS)
def test_gradients_are_those_of_cached_training(backbone, tmp_path, heads_kind):
    made = random_rows(11)
    nothing = KeptStates(tmp_path / "states")
    write_cache(backbone, made, nothing, tmp_path, batch_tokens=64, rows_per_shard=4, name="train")
    cached, online = (training_module(kind, backbone, heads_kind) for kind in (HeadsForTraining, OnlineHeads))
    theirs = cached(**batch_of(HeadsDataset(read_cache(tmp_path), HEADS)))
    ours = online(**batch_of(PackedRows(made, HEADS, 48, seed=0)))
    assert torch.equal(ours["counts"], theirs["counts"])
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-5, atol=0)
    for module, out in ((cached, theirs), (online, ours)):
        out["loss"].backward()
        assert all(parameter.grad is None for parameter in backbone.model.parameters()), module
    for (name, expected), parameter in zip(cached.named_parameters(), online.parameters(), strict=True):
        assert expected.grad.abs().sum() > 0, name
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", [HeadsForTraining, OnlineHeads])
def test_heads_that_learnt_a_period_draft_what_comes_next(backbone, kind):
    """From labels to drafts: head k is trained for the token that decoding takes from it, k + 1 places on."""
    ids, period = [place % 10 for place in range(60)], 10
    row = Row("", "train", [], ids, [(5, 60)], "stop")
    heads = MedusaHeads.for_backbone(backbone, HeadsConfig(HEADS, 1, backbone.hidden_size, VOCABULARY))
    module = kind(heads, backbone, LossWeights(soft_share=0.0)).train()
    cached = kind is HeadsForTraining
    batch = batch_of(HeadsDataset([shard_of(backbone, [row], 64)], HEADS) if cached else PackedRows([row], HEADS, 2, 0))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        module(**batch)["loss"].backward()
        optimizer.step()
    places = range(10, 50)
    with torch.inference_mode():
        hidden = backbone.hidden_states(torch.tensor([ids]))[0, list(places)]
        drafting = MedusaModel(backbone, heads).medusa_drafter(Tree.chain(HEADS)).start(places, 9, [None] * len(places))
        texts, rows = [ids[: place + 2] for place in places], list(range(len(places)))
        draft = drafting(Context(texts, hidden, torch.tensor([text[-1] for text in texts]), rows, [0] * 40, rows))
    assert draft.tokens.tolist() == [[(place + ahead) % period for ahead in range(1, HEADS + 2)] for place in places]


def test_a_pack_of_two_texts_has_the_losses_of_both(backbone):
    made = random_rows(2, seed=3)
    online = training_module(OnlineHeads, backbone)
    together = online(**batch_of(PackedRows(made, HEADS, 64, seed=0)))
    apart = [online(**batch_of(PackedRows([row], HEADS, 2, seed=0))) for row in made]
    assert len(PackedRows(made, HEADS, 64, seed=0)) == 1
    torch.testing.assert_close(together["sums"], apart[0]["sums"] + apart[1]["sums"], rtol=1e-4, atol=1e-4)
    assert torch.equal(together["counts"], apart[0]["counts"] + apart[1]["counts"])


def train_sharded(rank, port, path):
    """One of two processes: three steps of heads that FSDP2 shares out, and of whole ones; rank 0 writes both."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    backbone = Backbone.wrap(make_llama(vocab_size=VOCABULARY))
    whole, sharded = (training_module(OnlineHeads, backbone) for _ in range(2))
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (2,)))
    batch = batch_of(PackedRows(random_rows(11), HEADS, 48, seed=0))
    half = len(batch["labels"]) // 2
    valid = (batch["labels"] != IGNORED).sum()
    part = {name: tensor[half:] if rank else tensor[:half] for name, tensor in batch.items()}
    for module, inputs, ranks in ((whole, batch, 1), (sharded, part, 2)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            (module(**inputs, num_items_in_batch=valid)["loss"] * ranks).backward()  # gradients are averaged
            optimizer.step()
    gathered = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save((gathered, whole.state_dict()), path)
    dist.destroy_process_group()


def test_heads_that_fsdp_shares_out_learn_the_same_and_are_gathered_whole(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train_sharded, (port, tmp_path / "heads.pt"), nprocs=2)
    ours, theirs = torch.load(tmp_path / "heads.pt", weights_only=True)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_heads_are_taken_from_what_all_ranks_gather(backbone):
    """Under ZeRO-3 a rank's own parameters are empty; every rank has to take part, and the first gets the heads."""
    online, wrapper, asked = training_module(OnlineHeads, backbone), object(), []
    gathered = {name: tensor.clone() for name, tensor in online.state_dict().items()}
    for parameter in online.parameters():
        parameter.data = torch.empty(0)

    def gather(module):
        asked.append(module)
        return gathered

    for rank in range(2):
        trainer = SimpleNamespace(
            model=online, model_wrapped=wrapper, backbone=backbone, args=SimpleNamespace(device=torch.device("cpu")),
            accelerator=SimpleNamespace(get_state_dict=gather), is_world_process_zero=lambda rank=rank: rank == 0,
        )  # fmt: skip
        whole = whole_heads(trainer, online.heads)
        assert (whole is None) == (rank > 0)
        if whole:
            found = {f"heads.{name}": tensor for name, tensor in whole.state_dict().items()}
            assert found.keys() == gathered.keys()
            assert all(torch.equal(tensor, gathered[name]) for name, tensor in found.items())
    assert asked == [wrapper, wrapper]


def test_the_backbone_stays_out_of_training(backbone):
    online = training_module(OnlineHeads, backbone)
    assert not backbone.model.training
    assert not [name for name in online.state_dict() if "heads." not in name]
    assert {id(p) for p in online.parameters()}.isdisjoint(id(p) for p in backbone.model.parameters())


def test_states_ahead_are_a_view():
    hidden = torch.randn(5, 4)
    ahead = states_ahead(hidden, 3)
    for place in range(5):
        for k in range(3):
            expected = hidden[place + k + 1] if place + k + 1 < 5 else torch.zeros(4)
            assert torch.equal(ahead[place, k], expected)
    assert ahead.untyped_storage().nbytes() == 8 * 4 * 4


@pytest.fixture
def recipe_file(tmp_path, tiny_chat_folder):
    talks = [
        {"messages": [
            {"role": "user", "content": f"what is the cat {i} ?"},
            {"role": "assistant", "content": " ".join(["the", "cat", "sat", "on", "mat"][: 2 + i % 4] * 3)},
        ]}
        for i in range(30)
    ]  # fmt: skip
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    recipe = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"num_heads": 2, "kind": "hydra", "lm_head": "shared", "draft_vocab_size": 128},
        "data": {"conversations": str(tmp_path / "talks.jsonl"), "calibration_share": 0.2, "heldout_share": 0.2},
        "training": {"mode": "online", "pack_tokens": 96, "num_train_epochs": 3, "save_steps": 4, "logging_steps": 4},
        "inference": {"tree_sizes": [1, 4], "step_time_rounds": 1, "step_time_steps": 2},
        "eval": {"num_prompts": 2, "max_new_tokens": 6, "repeats": 1},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it."""


def test_a_whole_run_without_cached_training_states_and_after_a_kill(recipe_file, monkeypatch):
    unbroken = Job(load_recipe(recipe_file))
    run_stages(unbroken, "eval")
    assert unbroken.recipe.training.per_device_train_batch_size == 1
    assert sorted(path.name for path in unbroken.folder.stage("cache").iterdir() if path.is_dir()) == [
        "calibration", "heldout",
    ]  # fmt: skip
    result = unbroken.folder.result("train")["result"]
    assert result["last_loss"] < result["first_loss"]
    assert result["optimizer_steps"] > 8
    assert result["positions"] == sum(row.learnt_tokens - 1 for row in unbroken.rows("train"))

    job = Job(load_recipe(recipe_file, [f"output_dir={recipe_file.parent / 'killed'}"]))
    steps, step = iter(range(6)), torch.optim.AdamW.step

    def dying(*arguments, **keywords):
        if next(steps, None) is None:
            raise Killed
        return step(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", dying)
        with pytest.raises(Killed):
            run_stages(job, "train")
    run_stages(job, "train")
    ours, theirs = (load_file(j.folder.heads / "medusa_lm_head.safetensors") for j in (job, unbroken))
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_what_online_training_refuses(recipe_file, monkeypatch):
    job = Job(load_recipe(recipe_file, [f"output_dir={recipe_file.parent / 'whole'}"]))
    run_stages(job, "distill")
    longest_prompt = max(row.spans[0][0] for row in job.rows("train"))
    short = [f"data.max_length={longest_prompt + 4}"]
    with pytest.raises(UserError, match=r"heads\.num_heads=9, but the longest training answer has"):
        run_stages(Job(load_recipe(recipe_file, [*short, "heads.num_heads=9"])), "train")

    def refuse(backbone):
        raise UserError("no packs for this one")

    monkeypatch.setattr("medusa_train.train_stage.check_packing", refuse)
    with pytest.raises(UserError, match="no packs"):
        run_stages(Job(load_recipe(recipe_file, [*short, "heads.num_heads=2"])), "train")


def test_distillation_keeps_no_states_that_nothing_would_read(recipe_file):
    prompts = recipe_file.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is the cat {i} ?"}) + "\n" for i in range(12)))
    words = ["data.conversations=null", f"data.prompts={prompts}", "data.num_prompts=null", "data.max_new_tokens=4"]
    for mode in ("online", "cached"):
        job = Job(
            load_recipe(recipe_file, [*words, f"training.mode={mode}", f"output_dir={recipe_file.parent / mode}"])
        )
        run_stages(job, "distill")
        assert (job.folder.stage("distill") / "states").exists() == (mode == "cached")
