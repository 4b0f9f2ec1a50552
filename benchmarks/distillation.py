"""Making the data: ``python benchmarks/distillation.py [RUN]``, RUN being the folder of a distilled run.

Two questions, each answered in one process, with the arms in turn so that a busy machine slows all alike:

- Tokens per second of answers, as distillation makes them (greedy, hidden states kept), beside `generate` of
  transformers on the same weights, left-padded, at whichever of the batch sizes is best for it. Counted are an answer's
  tokens up to and including its end token, whatever is computed behind it.
- Tokens per second of the hidden-state cache, disk and checksums included, beside the model's bare forward pass over
  as many tokens without any padding, which is as fast as the model can read.

The backbone is loaded twice for the first question, since ours packs its weights for CPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from medusa_train.data.generation import generate_batch
from medusa_train.data.hidden_states import KeptStates, write_cache
from medusa_train.data.rows import Row, read_rows
from medusa_train.inference.backbone import Backbone, load_backbone, resolve_source
from medusa_train.inference.files import write_json
from medusa_train.recipe import Recipe
from medusa_train.run_folder import environment


def load_plain(source: str, backbone: Backbone) -> PreTrainedModel:
    """The same weights as transformers has them."""
    location, gguf_file = resolve_source(source)
    gguf = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)} if gguf_file else {}
    model = AutoModelForCausalLM.from_pretrained(location, dtype=backbone.dtype, **gguf).eval()
    return model.to(backbone.device)


def batches(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    return [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]


def answer_ours(backbone: Backbone, prompts: Sequence[list[int]], size: int, max_new_tokens: int) -> int:
    """Answer tokens, made as distillation makes them."""
    total = 0
    for batch in batches(prompts, size):
        states: list[torch.Tensor] = []
        answers = generate_batch(
            backbone,
            batch,
            max_new_tokens,
            backbone.eos_token_ids,
            states=lambda _, hidden, kept=states: kept.append(hidden),
        )
        total += sum(map(len, answers))
    return total


@torch.inference_mode()
def answer_plain(
    model: PreTrainedModel, prompts: Sequence[list[int]], size: int, max_new_tokens: int, ends: Sequence[int]
) -> int:
    """Answer tokens, made by padded `generate`."""
    total = 0
    for batch in batches(prompts, size):
        longest = max(map(len, batch))
        ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        found = model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=max_new_tokens, do_sample=False,
            eos_token_id=list(ends), pad_token_id=ends[0], repetition_penalty=1.0,
        )  # fmt: skip
        for answer in found[:, longest:].tolist():
            end = next((place for place, token in enumerate(answer) if token in ends), len(answer) - 1)
            total += end + 1
    return total


def cache_ours(backbone: Backbone, rows: Sequence[Row], batch_tokens: int) -> int:
    """Tokens read while a cache of the rows is written."""
    with tempfile.TemporaryDirectory() as folder:
        write_cache(backbone, rows, KeptStates(Path(folder) / "none"), Path(folder), batch_tokens, 64, "benchmark")
    return sum(len(row.input_ids) for row in rows)


@torch.inference_mode()
def read_plain(backbone: Backbone, rows: Sequence[Row], batch_tokens: int) -> int:
    """Tokens read by the bare forward pass, in full batches of the rows' mean length."""
    tokens = torch.tensor([token for row in rows for token in row.input_ids])
    length = max(1, len(tokens) // len(rows))
    wide = max(1, batch_tokens // length)
    texts = tokens[: len(tokens) // length * length].view(-1, length)
    for batch in texts.split(wide):
        hidden = backbone.decoder(input_ids=batch.to(backbone.device), use_cache=False)[0]
    hidden[0, 0, 0].item()  # waits for the device
    return texts.numel()


def rate(work: Callable[[], int]) -> float:
    start = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - start)


def in_turn(arms: dict[str, Callable[[], int]], turns: int) -> dict[str, dict[str, float]]:
    """Tokens per second of every arm: the median of the turns, and their range."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(turns):
        for name, work in arms.items():
            rates[name].append(rate(work))
            print(f"{name}: {rates[name][-1]:.0f} tokens/s", flush=True)
    return {
        name: {"tokens_per_second": statistics.median(found), "slowest": min(found), "fastest": max(found)}
        for name, found in rates.items()
    }


def measure_answers(
    backbone: Backbone, source: str, prompts: Sequence[list[int]], sizes: Sequence[int], budget: int, turns: int
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Rates of both arms, and the batch size that was best for each."""
    plain, ends = load_plain(source, backbone), backbone.eos_token_ids
    work: dict[str, Callable[[Sequence[list[int]], int, int], int]] = {
        "distillation": lambda prompts, size, budget: answer_ours(backbone, prompts, size, budget),
        "generate": lambda prompts, size, budget: answer_plain(plain, prompts, size, budget, ends),
    }
    best = {}
    for name, answer in work.items():
        answer(prompts[:2], 2, 4)  # what is made once is made before the clock runs
        found = {size: rate(partial(answer, prompts, size, budget)) for size in sizes}
        print(
            f"{name}: " + ", ".join(f"batch {size} {speed:.0f} tokens/s" for size, speed in found.items()), flush=True
        )
        best[name] = max(found, key=lambda size: found[size])
    return in_turn({name: partial(answer, prompts, best[name], budget) for name, answer in work.items()}, turns), best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/quickstart"))
    parser.add_argument("--backbone", help="another source than the run's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", default="8,16,32,64", help="tried for both; each arm gets its best")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()

    record = json.loads((options.run / "distill" / "run.json").read_text(encoding="utf-8"))
    recipe = Recipe.model_validate(record["recipe"])
    source = options.backbone or recipe.backbone.source
    rows = read_rows(options.run / "distill" / "rows.jsonl")[: options.prompts]
    prompts = [row.input_ids[: row.spans[0][0]] for row in rows]
    backbone = load_backbone(source, options.dtype, recipe.backbone.device)
    sizes = [int(size) for size in options.batch_sizes.split(",")]

    answers, best = measure_answers(backbone, source, prompts, sizes, options.max_new_tokens, options.turns)
    batch_tokens = recipe.data.cache_batch_tokens
    read_plain(backbone, rows[:2], batch_tokens)
    states = in_turn(
        {
            "cache": lambda: cache_ours(backbone, rows, batch_tokens),
            "prefill": lambda: read_plain(backbone, rows, batch_tokens),
        },
        options.turns,
    )
    result: dict[str, Any] = {
        "settings": {
            "backbone": source, "dtype": str(backbone.dtype), "prompts": len(prompts),
            "max_new_tokens": options.max_new_tokens, "batch_size": best, "cache_batch_tokens": batch_tokens,
            "turns": options.turns,
        },
        "environment": environment(),
        "answers": answers,
        "states": states,
        "distillation_over_generate": answers["distillation"]["tokens_per_second"]
        / answers["generate"]["tokens_per_second"],
        "cache_over_prefill": states["cache"]["tokens_per_second"] / states["prefill"]["tokens_per_second"],
    }  # fmt: skip
    if options.out:
        write_json(options.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
