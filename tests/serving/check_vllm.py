"""Proof that exported heads draft in vLLM what they draft here.

Equal text alone would prove nothing: verification makes the text right even if the heads were loaded as garbage. So
vLLM's counts of accepted drafts, depth by depth, must also equal those of our own chain. In fp32 at temperature 0,
where both engines compute the same function; prompts go in and texts come out as token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from medusa_train.data.rows import read_rows
from medusa_train.formats import export_heads
from medusa_train.inference import MedusaDrafter, MedusaModel, NoDrafter, Tree
from medusa_train.inference.backbone import resolve_source
from medusa_train.inference.checkpoint import load_heads
from medusa_train.inference.files import write_json

RUNNER = Path(__file__).with_name("vllm_run.py")


def load_fp32(source: str) -> Any:
    """The backbone as transformers has it: ours packs its weights for the CPU, and could not be saved."""
    location, gguf_file = resolve_source(source)
    gguf = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)} if gguf_file else {}
    return AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32, **gguf).eval()


def our_chain(model: MedusaModel, prompts: list[list[int]], texts: list[list[int]]) -> dict[str, Any]:
    """Steps with a chain of every head until ``texts`` are complete, and how many of them accepted each depth.

    vLLM counts what a step accepted before it cuts the text at its end, so each run goes on a little beyond.
    """
    num_heads = model.heads.config.num_heads
    drafter = MedusaDrafter(model.heads, Tree.chain(num_heads))
    drafts, accepted_at = 0, [0] * num_heads
    for prompt, text in zip(prompts, texts, strict=True):
        emitted: list[int] = []
        for block in model.stream(torch.tensor(prompt), len(text) + num_heads + 1, eos_token_ids=(), drafter=drafter):
            if 0 < len(emitted) < len(text):
                drafts += 1
                accepted_at = [count + (block.drafted > depth) for depth, count in enumerate(accepted_at)]
            emitted += block.tokens
        assert emitted[: len(text)] == text, "our chain changed the text"
    return {"drafts": drafts, "accepted": sum(accepted_at), "accepted_at": accepted_at}


def vllm_environment(python: Path) -> dict[str, str]:
    """Variables under which vLLM runs on a CPU, for its interpreter."""
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
    }


@contextmanager
def serving(python: Path, model: Path, name: str, speculation: dict[str, Any] | None = None) -> Iterator[str]:
    """A vLLM server of a folder; its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", name,
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    command += ["--speculative-config", json.dumps(speculation)] if speculation else []
    process = subprocess.Popen(list(map(str, command)), env=vllm_environment(python))
    url = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(300):
            if process.poll() is not None:
                sys.exit(f"vLLM ended with exit code {process.returncode}; what it said stands above")
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def run_vllm(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Tokens and counters of one vLLM process."""
    with tempfile.NamedTemporaryFile() as file:
        given = json.dumps(job | {"result": file.name})
        if code := subprocess.run(
            [python, RUNNER], input=given, text=True, env=vllm_environment(python), check=False
        ).returncode:
            sys.exit(f"vLLM failed with exit code {code}; what it said stands above")
        result: dict[str, Any] = json.load(file)
    return result


def main() -> None:
    """Run the three arms and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run: its heads, and prompts from its rows")
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter that has vLLM")
    parser.add_argument("--backbone", help="another source than the heads' config names")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()

    rows = sorted(read_rows(options.run / "distill" / "rows.jsonl"), key=lambda row: row.split != "heldout")
    prompts = [row.input_ids[: row.spans[0][0]] for row in rows[: options.prompts]]
    heads = options.run / "heads"
    backbone = load_fp32(options.backbone or load_heads(heads).backbone_source)
    model = MedusaModel.from_pretrained(heads, backbone)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        backbone.save_pretrained(folder / "backbone")
        export_heads(heads, folder / "heads", "vllm", pad_vocabulary=True)
        job = {
            "model": str(folder / "backbone"),
            "heads": None,
            "num_heads": model.heads.config.num_heads,
            "prompts": prompts,
            "max_new_tokens": options.max_new_tokens,
            "eos": list(model.backbone.eos_token_ids),
        }
        plain = run_vllm(options.vllm, job)
        speculative = run_vllm(options.vllm, job | {"heads": str(folder / "heads")})
    texts = [
        model.generate(torch.tensor(prompt), options.max_new_tokens, drafter=NoDrafter()).new_tokens[0]
        for prompt in prompts
    ]
    ours = our_chain(model, prompts, texts)
    equal = {
        "text_with_and_without_speculation": speculative["tokens"] == plain["tokens"],
        "text_of_both_engines": plain["tokens"] == texts,
        "acceptance_counts": all(ours[key] == speculative[key] for key in ours),
    }
    result = {
        "vllm": plain["version"],
        "prompts": len(prompts),
        "tokens": sum(map(len, texts)),
        "ours": ours | {"tokens_per_step": 1 + ours["accepted"] / ours["drafts"]},
        "theirs": {key: speculative[key] for key in ours},
        "equal": equal,
    }
    if options.out:
        write_json(options.out, result)
    print(json.dumps(result, indent=2))
    if not all(equal.values()):
        different = [place for place, (a, b) in enumerate(zip(speculative["tokens"], texts, strict=True)) if a != b]
        sys.exit(f"not equal: {[name for name, same in equal.items() if not same]}; prompts {different}")


if __name__ == "__main__":
    main()
