"""Ways of decoding the same prompts, side by side: our drafters, and what transformers offers.

One process, one model object, greedy, the same budget; arms take turns on every batch in an order that rotates, after
a round that is not counted. A run's clock starts when its first tokens are there, so prefill is apart. Answers are kept
as they come (`collect`), so that a comparison of hours that is killed goes on where it was.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from medusa_train.eval.answers import Answer, AnswerFile, Answers, local_ask, prompt_ids
from medusa_train.eval.arms import ARMS, BATCH_OF_ONE, DRAFTERS, LOOKUP_TOKENS, NEED_DRAFT_MODEL, make_decoder
from medusa_train.eval.collect import collect
from medusa_train.eval.figures import repeat_ratios, total
from medusa_train.eval.lossless import compare_outputs
from medusa_train.eval.questions import Question
from medusa_train.eval.simulate import PARTS, part_seconds
from medusa_train.eval.speed import Spread, decode_speed
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.drafters import Drafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.prompt_lookup import BESIDE_HEADS
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
    kept: AnswerFile,
) -> dict[str, Any]:
    """Decode the questions' first turns in every way and put the figures together; see ``DEFINITIONS``.

    Args:
        kept: answers of a comparison that was killed, and of this one.

    Raises:
        UserError: a question does not fit the model's context, there are too few for a batch, or nothing was decoded.
    """
    # Two that begin alike are one.
    questions = list({each.id: each for each in (replace(question, follow_ups=()) for question in questions)}.values())
    prompts = [prompt_ids(question, tokenizer) for question in questions]
    check_prompts(model.backbone, prompts, batch_sizes, max_new_tokens)
    models = {False: model, True: model.compiled()}  # one backbone, the same heads
    asks = {
        arm: local_ask(
            make_decoder(arm.removesuffix(COMPILED), models[arm.endswith(COMPILED)], draft_model),
            model.backbone,
            tokenizer,
        )
        for arm in arms
    }
    together = {size: [arm for arm in arms if size == 1 or arm not in BATCH_OF_ONE] for size in batch_sizes}
    everything = range(len(questions))
    timed = collect(
        asks, questions, everything, max_new_tokens, repeats, kept, together, needed=arms, compiled=COMPILED_ARMS
    ).timed
    rows = []
    for size, arm in ((size, arm) for size, arms in timed.items() for arm in arms):
        found, plain = timed[size][arm], timed[size].get("plain")
        row = {"arm": arm, "batch_size": size, "prompts": len(found[0]), **_figures(found)}
        for base in ("generate", "plain", "plain" + COMPILED):
            reference = timed[size].get(base)
            row[f"over_{base}"] = reference and asdict(repeat_ratios(over=reference, of=found))
        same = compare_outputs(model.backbone, plain[0], found[0]) if plain else None
        row["identical_to_plain"] = same and same["identical_share"]
        row["differences"] = same["differences"] if same else []
        row["outside_forward"] = None
        if (name := arm.removesuffix(COMPILED)) in DRAFTERS:
            ours, first = models[arm != name], [torch.tensor(prompt) for prompt in prompts[:size]]
            stats = [answer.stats for repeat in found for answer in repeat]
            row["outside_forward"] = outside_forward(ours, DRAFTERS[name](ours, draft_model), first, stats)
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
            "tree_sizes": {size: model.drafter.tree_for(size).size for size in batch_sizes},
            "lookup_tokens": LOOKUP_TOKENS,
            "lookup_tokens_beside_heads": BESIDE_HEADS,
        },
        "rows": rows,
        "categories": by_category(questions, timed.get(1, {})),
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


def check_prompts(
    backbone: Backbone, prompts: Sequence[Sequence[int]], batch_sizes: Sequence[int], max_new_tokens: int
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


def _figures(answers: Answers) -> dict[str, Any]:
    raw, per_pass = [], []
    for repeat in answers:
        counted, seconds, made = total(repeat), sum(answer.decode_seconds for answer in repeat), passes(repeat)
        per_pass.append(1000 * seconds / max(1, made))
        raw.append(
            {
                "tokens": sum(answer.tokens for answer in repeat),
                "prefill_tokens": counted.prefill_tokens,
                "step_tokens": counted.step_tokens,
                "steps": counted.steps,
                "passes": made,
                "prefill_seconds": sum(answer.prefill_seconds for answer in repeat),
                "decode_seconds": seconds,
                "tokens_per_second": decode_speed(repeat),
            }
        )
    first = total(answers[0])
    return {
        "tokens_per_second": asdict(Spread.of([row["tokens_per_second"] for row in raw])),
        "tokens_per_step": first.tokens_per_step,
        "histogram": dict(sorted(first.histogram.items())),
        "ms_per_pass": asdict(Spread.of(per_pass)),
        "repeats": raw,
    }


def passes(answers: Sequence[Answer]) -> int:
    """Passes of the backbone after prefill: as many as the longest answer of each batch has steps."""
    steps = [answer.stats.steps for answer in answers]
    size = answers[0].batch_size
    return sum(max(steps[start : start + size]) for start in range(0, len(steps), size))


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


def by_category(questions: Sequence[Question], arms: Mapping[str, Answers]) -> list[dict[str, Any]]:
    """Tokens per step and tokens/s of every arm on the prompts of each category, at batch size 1."""
    rows = []
    for category in dict.fromkeys(question.category for question in questions if question.category):
        numbers = [number for number, question in enumerate(questions) if question.category == category]
        for arm, answers in arms.items():
            chosen = [[repeat[number] for number in numbers] for repeat in answers]
            # A few prompts may all end with their first token; the whole file may not.
            speed = asdict(Spread.of([decode_speed(repeat) for repeat in chosen])) if total(chosen[0]).steps else None
            rows.append(
                {
                    "category": category,
                    "prompts": len(numbers),
                    "arm": arm,
                    "tokens_per_step": total(chosen[0]).tokens_per_step,
                    "tokens_per_second": speed,
                }
            )
    return rows
