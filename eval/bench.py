"""Ways of decoding the same prompts, side by side: our drafters, and what transformers offers.

One process, one model object, greedy, the same budget; arms take turns on every batch in an order that rotates, after
a round that is not counted. A run's clock starts when its first tokens are there, so prefill is apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import render_prompt
from medusa_train.eval.arms import (
    ARMS,
    BATCH_OF_ONE,
    DRAFTERS,
    LOOKUP_TOKENS,
    NEED_DRAFT_MODEL,
    make_decoder,
)
from medusa_train.eval.lossless import first_divergence
from medusa_train.eval.questions import Question
from medusa_train.eval.simulate import PARTS, part_seconds
from medusa_train.eval.speed import (
    Run,
    Runs,
    Spread,
    decode_speed,
    measure,
    speedup,
    total,
)
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.drafters import Drafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.stopping import Stopping
from medusa_train.inference.verify import verify_greedy

COMPILED = "+compiled"  # ending of an arm's name whose steps are compiled
COMPILED_ARMS = tuple(arm + COMPILED for arm in DRAFTERS)
GPU_PART_TOKENS = 64  # budget of the run that times parts on a GPU

DEFINITIONS = {
    "tokens_per_second": "decode tokens/s: tokens after the first ones / time from the first ones to the last, all "
    "rows of a batch together; prefill and warm-up are not in it; one figure per repeat, then the median",
    "tokens_per_step": "tokens emitted by steps / steps; a step is one row's share of one pass after prefill, a block "
    "cut by the budget or an end token counts what was emitted; plain = 1",
    "prefill_tokens": "tokens there when the decode clock starts: one per row, for transformers' assisted decoding "
    "what its first pass accepted; tokens = prefill_tokens + step_tokens",
    "over_generate, over_plain, over_plain+compiled": "ratio of decode tokens/s at the same batch size, repeat by "
    "repeat",
    "ms_per_pass": "decode time / passes of the backbone after prefill",
    "outside_forward": "(draft + verify + commit) / all of a step; on a GPU from a run of its own over the first "
    "batch, in which the device is waited for between these parts",
    "identical_to_plain": "share of outputs equal to plain's at the same batch size, token for token; differences give "
    "the first differing place and the gap between the backbone's two best logits there",
    "batches": "prompts in file order, in full batches only",
}


def bench(
    model: MedusaModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    draft_model: Backbone | None,
    arms: Sequence[str],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Decode the questions' first turns in every way and put the figures together; see ``DEFINITIONS``.

    Raises:
        UserError: a question does not fit the model's context, there are too few for a batch, or nothing was decoded.
    """
    prompts = [torch.tensor(render_prompt(tokenizer, question.messages)) for question in questions]
    check_prompts(model.backbone, prompts, batch_sizes, max_new_tokens)
    models = {False: model, True: model.compiled()}  # one backbone, the same heads
    decoders = {
        arm: make_decoder(arm.removesuffix(COMPILED), models[arm.endswith(COMPILED)], draft_model) for arm in arms
    }
    batches = {size: _full_batches(prompts, size) for size in batch_sizes}
    runs = measure(decoders, batches, max_new_tokens, repeats, BATCH_OF_ONE, COMPILED_ARMS)
    rows = []
    for (size, arm), found in runs.items():
        row = {"arm": arm, "batch_size": size, "prompts": size * len(batches[size]), **_figures(found)}
        for base in ("generate", "plain", "plain" + COMPILED):
            reference = runs.get((size, base))
            row[f"over_{base}"] = reference and asdict(speedup(over=reference, of=found))
        row |= _compare(model.backbone, batches[size], found[0], runs.get((size, "plain"), [None])[0])
        if (name := arm.removesuffix(COMPILED)) in DRAFTERS:
            timed = models[arm != name]
            stats = [run.stats for repeat in found for run in repeat]
            row["outside_forward"] = outside_forward(timed, DRAFTERS[name](timed, draft_model), batches[size][0], stats)
        else:
            row["outside_forward"] = None
        rows.append(row)
    return {
        "definitions": DEFINITIONS,
        "verifier": "greedy: exact, the output is that of plain greedy decoding",
        "setting": {
            "backbone": model.backbone.source,
            "draft_model": draft_model and draft_model.source,
            "dtype": str(model.backbone.dtype).removeprefix("torch."),
            "device": str(model.backbone.device),
            "temperature": 0,
            "prompts": len(questions),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "batch_sizes": list(batch_sizes),
            "arms": list(arms),
            "num_heads": model.heads.config.num_heads,
            "draft_vocab_size": model.heads.config.draft_vocab_size,
            "tree_paths": [list(path) for path in model.tree.paths if path],
            "lookup_tokens": LOOKUP_TOKENS,
        },
        "rows": rows,
        "categories": by_category(questions, {arm: runs[1, arm] for arm in arms if (1, arm) in runs}),
    }


def check_prompts_file(path: Path) -> None:
    """Refuse a file that is not there, before a model is loaded.

    Raises:
        UserError: no such file, or not JSON lines by its name.
    """
    if path.suffix != ".jsonl":
        raise UserError(f"prompts {path}: name a .jsonl file with a prompt, messages or turns in every line")
    if not path.is_file():
        raise UserError(f"prompts {path}: no such file")


def parse_batch_sizes(text: str) -> list[int]:
    """``1,2,4`` -> batch sizes in that order, each once.

    Raises:
        UserError: not positive whole numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--batch-sizes {text}: give positive whole numbers like 1,2,4")
    return list(dict.fromkeys(map(int, words)))


def choose_arms(text: str | None, has_draft_model: bool, batch_sizes: Sequence[int]) -> list[str]:
    """``a,b,c`` -> names of arms; None -> every arm that can run.

    Raises:
        UserError: an unknown name (the nearest is told), an arm without its draft model, or one that no batch suits.
    """
    if text is None:
        return [
            arm
            for arm in ARMS
            if (has_draft_model or arm not in NEED_DRAFT_MODEL) and (1 in batch_sizes or arm not in BATCH_OF_ONE)
        ]
    arms = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for arm in arms:
        check_name("--arms", arm, (*ARMS, *COMPILED_ARMS))
        if arm.removesuffix(COMPILED) in NEED_DRAFT_MODEL and not has_draft_model:
            raise UserError(f"--arms {arm} needs a small model of the same tokenizer; add --draft-model")
        if arm in BATCH_OF_ONE and 1 not in batch_sizes:
            raise UserError(f"--arms {arm} decodes one prompt at a time; add 1 to --batch-sizes")
    return arms


def check_name(option: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not known, telling the nearest one.

    Raises:
        UserError: ``name`` is not in ``known``.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"{option} {name!r} is unknown; {hint}")


def _full_batches(prompts: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    return [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]


def check_prompts(
    backbone: Backbone, prompts: Sequence[Tensor], batch_sizes: Sequence[int], max_new_tokens: int
) -> None:
    """Refuse prompts that are too few for a batch or too long for the budget.

    Raises:
        UserError: which of both, and what to do.
    """
    if (largest := max(batch_sizes)) > len(prompts):
        raise UserError(f"a batch of {largest} needs as many prompts, there are {len(prompts)}; give more prompts")
    longest = max(map(len, prompts))
    if backbone.max_positions is not None and longest + max_new_tokens > backbone.max_positions:
        raise UserError(
            f"the longest prompt has {longest} tokens; with --max-new-tokens {max_new_tokens} that exceeds the "
            f"backbone's {backbone.max_positions}; lower it or shorten the prompt"
        )


# Figures


def _figures(runs: Runs) -> dict[str, Any]:
    raw, per_pass = [], []
    for repeat in runs:
        counted, seconds = total(repeat), sum(run.decode_seconds for run in repeat)
        per_pass.append(1000 * seconds / max(1, counted.passes))
        raw.append(
            {
                "tokens": sum(len(row) for run in repeat for row in run.ids),
                "prefill_tokens": counted.prefill_tokens,
                "step_tokens": counted.step_tokens,
                "steps": counted.steps,
                "passes": counted.passes,
                "prefill_seconds": sum(run.prefill_seconds for run in repeat),
                "decode_seconds": seconds,
                "tokens_per_second": decode_speed(repeat),
            }
        )
    first = total(runs[0])
    return {
        "tokens_per_second": asdict(Spread.of([decode_speed(repeat) for repeat in runs])),
        "tokens_per_step": first.tokens_per_step,
        "histogram": dict(sorted(first.histogram.items())),
        "ms_per_pass": asdict(Spread.of(per_pass)),
        "repeats": raw,
    }


def _compare(
    backbone: Backbone, batches: Sequence[Sequence[Tensor]], runs: Sequence[Run], plain: Sequence[Run] | None
) -> dict[str, Any]:
    if plain is None:
        return {"identical_to_plain": None, "differences": []}
    prompts = [prompt for batch in batches for prompt in batch]
    ours, theirs = ([row for run in each for row in run.ids] for each in (runs, plain))
    differences = []
    for number, (prompt, ids, reference) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if found := first_divergence(backbone, prompt, ids, reference):
            differences.append({"prompt": number, **asdict(found)})
    return {"identical_to_plain": 1 - len(differences) / len(prompts), "differences": differences}


def outside_forward(
    model: MedusaModel, drafter: Drafter, prompts: Sequence[Tensor], measured: Sequence[DecodeStats]
) -> float | None:
    """Share of a step that is not the backbone's pass; None where nothing was timed.

    Args:
        measured: what was counted while decoding; believed on a CPU alone.
    """
    if model.backbone.device.type == "cpu":
        spent = {part: sum(getattr(stats, f"{part}_seconds") for stats in measured) for part in PARTS}
    else:  # launches return before their work is done, so the parts are timed in a run that waits between them
        steps = part_seconds(model.step, drafter, verify_greedy, prompts, Stopping(GPU_PART_TOKENS))
        spent = {part: sum(step[part] for step in steps) for part in PARTS}
    return 1 - spent["forward"] / sum(spent.values()) if spent["forward"] else None


def by_category(questions: Sequence[Question], runs: Mapping[str, Runs]) -> list[dict[str, Any]]:
    """Tokens per step and tokens/s of every arm on the prompts of each category, at batch size 1."""
    rows = []
    for category in dict.fromkeys(question.category for question in questions if question.category):
        numbers = [number for number, question in enumerate(questions) if question.category == category]
        for arm, repeats in runs.items():
            chosen = [[repeat[number] for number in numbers] for repeat in repeats]
            # A few prompts may all end with their first token; the whole file may not.
            steps = total(chosen[0]).steps
            rows.append(
                {
                    "category": category,
                    "prompts": len(numbers),
                    "arm": arm,
                    "tokens_per_step": total(chosen[0]).tokens_per_step,
                    "tokens_per_second": asdict(Spread.of([decode_speed(repeat) for repeat in chosen]))
                    if steps
                    else None,
                }
            )
    return rows
