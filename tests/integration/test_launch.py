"""Training through ``accelerate launch``: every way of launching gives the heads of one plain process."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

import medusa_train.recipes
from medusa_train.data.hidden_states import read_cache
from medusa_train.inference import UserError
from medusa_train.job import Job
from medusa_train.launch import check_launcher
from medusa_train.recipe import load_recipe
from medusa_train.stages import run_stages

LAUNCHERS = Path(medusa_train.recipes.__file__).parent / "accelerate"
WORDS = ["what", "is", "the", "cat", "on", "mat", "and", "this", "that", "sat", "user", "system"]
LIGER = "training.use_liger_kernel=true"
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def cached(tmp_path_factory, tiny_chat_folder):
    """A recipe and its folder after the cache stage: answers of 2 to 11 words, so batches differ in valid positions."""
    folder = tmp_path_factory.mktemp("launch")
    talks = [
        {"messages": [
            {"role": "user", "content": f"what {WORDS[i % 12]} {i} ?"},
            {"role": "assistant", "content": " ".join(WORDS[(i * j) % 12] for j in range(2 + i % 10))},
        ]}
        for i in range(24)
    ]  # fmt: skip
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    recipe = {
        "output_dir": str(folder / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"num_heads": 3, "num_layers": 1, "draft_vocab_size": 128},
        "data": {"conversations": str(folder / "talks.jsonl"), "calibration_share": 0.1, "heldout_share": 0.1},
        "training": {
            "num_train_epochs": 2, "per_device_train_batch_size": 32, "save_steps": 4, "logging_steps": 1,
            "load_best_model_at_end": False,
        },
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_stages(Job(load_recipe(path)), "cache")
    return path


@pytest.fixture
def fresh(cached, tmp_path):
    """The recipe, and an override that sends its run into a folder of this test."""
    shutil.copytree(load_recipe(cached).output_dir, tmp_path / "run")
    return cached, f"output_dir={tmp_path / 'run'}"


@pytest.fixture(scope="module")
def plain(cached):
    """Heads of one process with a batch of 32."""
    return train_here(cached)


def train_here(recipe, *overrides):
    folder = Path(load_recipe(recipe).output_dir)
    copy = shutil.copytree(folder, folder.with_name(f"here-{len(list(folder.parent.iterdir()))}"))
    job = Job(load_recipe(recipe, [*overrides, f"output_dir={copy}"]))
    run_stages(job, "train", overwrite=True)
    return saved(job.folder.heads)


def saved(heads):
    """Every tensor of a heads folder, those of an adapter too."""
    return {name: tensor for path in sorted(heads.rglob("*.safetensors")) for name, tensor in load_file(path).items()}


def launch(launcher, processes, recipe, *overrides, entry=None):
    """Run ``accelerate launch``; ``entry`` is a script that takes the place of ``-m medusa_train.train``."""
    with socket.socket() as free:  # another launch may run on this machine
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHERS / f"{launcher}.yaml"),
        "--num_processes", str(processes), "--main_process_port", str(port),
        *([str(entry)] if entry else ["-m", "medusa_train.train"]), str(recipe), *overrides,
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def entry_script(path, before):
    path.write_text(f"{before}\nfrom medusa_train.train import main\nmain()\n")
    return path


def assert_gave(done, output_dir, expected, within=1e-6):
    assert done.returncode == 0, done.stderr[-3000:]
    ours = saved(Path(output_dir.removeprefix("output_dir=")) / "heads")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_two_processes_give_the_heads_of_one(fresh, plain):
    recipe, output_dir = fresh
    done = launch("cpu", 2, recipe, output_dir, "training.per_device_train_batch_size=16")
    assert_gave(done, output_dir, plain)
    assert done.stderr.count("Loading weights: 100%") == 1, "progress is for one process to show"
    assert done.stdout.count("step 8/8 · loss") == 1


@pytest.mark.parametrize("lora", ["null", "{r: 4, dropout: 0, warmup_steps: 2}"])
def test_two_processes_with_the_backbone_in_the_loop_give_the_heads_of_one(fresh, cached, lora):
    recipe, output_dir = fresh
    online = ["training.mode=online", "training.pack_tokens=64", f"lora={lora}"]
    run_stages(Job(load_recipe(recipe, [*online, output_dir])), "cache", overwrite=True)
    done = launch("cpu", 2, recipe, output_dir, *online, "training.per_device_train_batch_size=1")
    expected = train_here(cached, *online, "training.per_device_train_batch_size=2")
    assert_gave(done, output_dir, expected)


FAILS_ON_RANK_1 = """
import os, torch
from medusa_train.inference import UserError, files
if os.environ["RANK"] == "1":
    def refuse(*_): raise AssertionError("only rank 0 writes")
    files.write_atomically = refuse
    steps, step = iter(range(6)), torch.optim.AdamW.step
    def failing(self, *arguments, **keywords):
        if next(steps, None) is None:
            raise UserError("the sixth step is too much; rest")
        return step(self, *arguments, **keywords)
    torch.optim.AdamW.step = failing
"""


def test_an_error_on_one_rank_ends_the_launch_and_the_next_one_goes_on(fresh, plain, tmp_path):
    recipe, output_dir = fresh
    words = [recipe, output_dir, "training.per_device_train_batch_size=16"]
    done = launch("cpu", 2, *words, entry=entry_script(tmp_path / "failing.py", FAILS_ON_RANK_1))
    assert done.returncode != 0
    assert "medusa-train: rank 1: the sixth step is too much; rest\n" in done.stderr
    assert "only rank 0 writes" not in done.stderr
    assert [path.name for path in (tmp_path / "run" / "train").glob("checkpoint-*")] == ["checkpoint-4"]
    assert not (tmp_path / "run" / "heads").exists()
    assert_gave(launch("cpu", 2, *words), output_dir, plain)


# On CPUs DeepSpeed compiles an extension for minutes, and works without it.
WITHOUT_COMPILING = "import deepspeed; deepspeed.ops.__compatible_ops__ = {}"


@needs_deepspeed
@pytest.mark.parametrize("launcher", ["zero2", "zero3"])
def test_deepspeed_gives_the_same_heads_whole(fresh, plain, tmp_path, launcher):
    recipe, output_dir = fresh
    done = launch(launcher, 1, recipe, output_dir, entry=entry_script(tmp_path / "entry.py", WITHOUT_COMPILING))
    assert_gave(done, output_dir, plain)


def test_the_fused_kernel_gives_the_same_heads(fresh, plain, monkeypatch):
    pytest.importorskip("liger_kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recipe, output_dir = fresh
    done = launch("cpu", 2, recipe, output_dir, "training.per_device_train_batch_size=16", LIGER)
    assert_gave(done, output_dir, plain, within=2e-5)


@needs_deepspeed
def test_the_fused_kernel_is_refused_where_projections_are_in_parts(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recipe, output_dir = fresh
    done = launch("zero3", 1, recipe, output_dir, LIGER, entry=entry_script(tmp_path / "entry.py", WITHOUT_COMPILING))
    assert done.returncode != 0
    assert "training.use_liger_kernel needs whole projections; launch with ddp.yaml" in done.stderr
    assert not (tmp_path / "run" / "heads").exists()


ONLY_RANK_0_WRITES = """
import os
from medusa_train.inference import files
from medusa_train.train import main
if os.environ["RANK"] == "1":
    write = files.write_atomically
    def only_shards(path, fill):
        assert path.name.startswith(("batch-", "shard-")), f"rank 1 writes {path}"
        write(path, fill)
    files.write_atomically = only_shards
main()
"""


def test_a_launch_shares_out_missing_answers_and_states_and_goes_on_from_what_one_began(cached, tmp_path):
    prompts = [{"prompt": f"what is {WORDS[i % 12]} {i} ?"} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    overrides = [
        "data.conversations=null", f"data.prompts={tmp_path / 'prompts.jsonl'}", "data.num_prompts=null",
        "data.batch_size=4", "data.max_new_tokens=9", "data.answer_tokens=120",
        "data.calibration_share=0.2", "data.heldout_share=0.2", "data.temperatures=[0.0, 0.8]",
    ]  # fmt: skip
    alone = Job(load_recipe(cached, [*overrides, f"output_dir={tmp_path / 'alone'}"]))
    run_stages(alone, "cache")
    rows = alone.folder.stage("distill") / "rows.jsonl"

    shared = Job(load_recipe(cached, [*overrides, f"output_dir={tmp_path / 'shared'}"]))
    run_stages(shared, "prompts")
    begun = shared.folder.begin("distill") / "appended" / "rank-00000.jsonl"
    begun.parent.mkdir()
    begun.write_bytes(b"".join(rows.read_bytes().splitlines(keepends=True)[:6]))  # a batch and half of another
    script = tmp_path / "entry.py"
    script.write_text(ONLY_RANK_0_WRITES)
    done = launch("cpu", 2, cached, *overrides, f"output_dir={tmp_path / 'shared'}", entry=script)
    assert done.returncode == 0, done.stderr[-3000:]
    for told in ("prompts: done, kept", "distill: rows ", "cache: train ", "train: positions "):
        assert done.stdout.count(told) == 1, done.stdout
    assert (shared.folder.heads / "medusa_lm_head.safetensors").exists()
    assert (shared.folder.stage("distill") / "rows.jsonl").read_bytes() == rows.read_bytes()
    assert sorted(path.name for path in shared.folder.stage("distill").iterdir()) == sorted(
        path.name for path in alone.folder.stage("distill").iterdir()
    )
    for split in ("train", "calibration", "heldout"):
        ours, theirs = (read_cache(job.folder.stage("cache") / split) for job in (shared, alone))
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.hidden.float(), other.hidden.float(), rtol=2**-7, atol=1e-5)
            assert torch.equal(mine.tokens, other.tokens)
    assert shared.folder.result("distill")["result"] == alone.folder.result("distill")["result"]


def test_what_a_launch_needs_is_said(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'medusa-train\[deepspeed\]'"):
        check_launcher("cpu")
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP runs on GPUs only"):
        check_launcher("cpu")


@pytest.mark.parametrize("path", sorted(LAUNCHERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_launcher_is_one_that_accelerate_reads(path):
    config = load_config_from_file(str(path))
    assert config.num_processes % config.num_machines == 0
