"""One evaluation: everything that a report states, measured on held-out prompts.

What each figure means is part of the result, so that a number never travels without its definition.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from medusa_train.data.hidden_states import Shard
from medusa_train.eval.acceptance import recall, replay, token_ranks
from medusa_train.eval.lossless import first_divergence
from medusa_train.eval.speed import (
    Run,
    Spread,
    decode_speed,
    drafter_decoder,
    generate_decoder,
    mean_prompt_speedup,
    measure,
    speedup,
    total,
)
from medusa_train.inference.drafters import NoDrafter
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.stats import DecodeStats

DEFINITIONS = {
    "tokens_per_step": "tokens emitted by steps / steps; a step is one backbone pass after prefill, the bonus token "
    "counts, prefill's token does not, a block cut by the budget or an end token counts what was emitted; plain = 1",
    "accepted_drafts_per_step": "tokens_per_step - 1",
    "speedup": "decode tokens/s of medusa / decode tokens/s of the baseline, repeat by repeat: all tokens / all time "
    "from the first token to the last; prefill and warm-up are not in it",
    "mean_prompt_speedup": "the ratio of per-prompt mean speeds, as Spec-Bench states it",
    "overhead": "seconds per medusa step / seconds per plain step",
    "replay": "greedy decoding replayed on cached held-out answers: what the heads' ranks give this tree",
}


def evaluate(
    model: MedusaModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Tensor],
    questions: Sequence[str],
    heldout: Sequence[Shard],
    max_new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Decode the prompts in every way and put the figures together; see ``DEFINITIONS``.

    Args:
        prompts: token ids ``(T,)`` of held-out prompts.
        questions: the same prompts as a person would read them.
        heldout: cached answers to the held-out prompts, for recall and replay.
    """
    ranks = token_ranks(model, heldout)
    decoders = {
        "generate": generate_decoder(model.backbone, {}),
        "plain": drafter_decoder(model, NoDrafter()),
        "medusa": drafter_decoder(model, model.drafter),
    }
    batches = {1: [[prompt] for prompt in prompts]}
    compiled = ("plain", "medusa") if model.step.compiled else ()
    found = measure(decoders, batches, max_new_tokens, repeats, compiled=compiled)
    runs = {name: found[1, name] for name in decoders}
    stats = total(runs["medusa"][0])
    predicted = replay(ranks, model.tree)
    plain, medusa = _step_seconds(runs["plain"]), _step_seconds(runs["medusa"])
    return {
        "definitions": DEFINITIONS,
        "verifier": "greedy: exact, the output is that of plain greedy decoding",
        "setting": {
            "backbone": model.backbone.source,
            "dtype": str(model.backbone.dtype).removeprefix("torch."),
            "device": str(model.backbone.device),
            "batch_size": 1,
            "temperature": 0,
            "prompts": len(prompts),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "compiled": model.step.compiled,
            "kind": model.heads.config.kind,
            "num_heads": model.heads.config.num_heads,
            "num_layers": model.heads.config.num_layers,
            "draft_vocab_size": model.heads.config.draft_vocab_size,
            "tree_size": model.tree.size,
            "tree_paths": [list(path) for path in model.tree.paths if path],
        },
        "acceptance": {
            "tokens_per_step": stats.tokens_per_step,
            "accepted_drafts_per_step": None if stats.tokens_per_step is None else stats.tokens_per_step - 1,
            "steps": stats.steps,
            "prefill_tokens": stats.prefill_tokens,
            "emitted_by_steps": stats.step_tokens,
            "histogram": dict(sorted(stats.histogram.items())),
            **_by_depth(stats, model.tree.depth),
            "accepted_per_drafted_node": _ratio(stats.step_tokens - stats.steps, stats.steps * (model.tree.size - 1)),
        },
        "replay": {
            "tokens_per_step": predicted.tokens_per_step,
            "steps": predicted.steps,
            "answers": predicted.prefill_tokens,
        },
        "recall": {f"top{best}": recall(ranks, best) for best in (1, 5, 10)},
        "speed": {
            arm: {
                "decode_tokens_per_second": asdict(Spread.of([decode_speed(repeat) for repeat in repeated])),
                "time_to_first_token_ms": asdict(
                    Spread.of([run.prefill_seconds * 1000 for repeat in repeated for run in repeat])
                ),
                "end_to_end_tokens_per_second": asdict(Spread.of([_end_to_end(repeat) for repeat in repeated])),
            }
            for arm, repeated in runs.items()
        },
        "speedup": {
            "over_generate": asdict(speedup(runs["generate"], runs["medusa"])),
            "over_plain": asdict(speedup(runs["plain"], runs["medusa"])),
            "mean_prompt_over_generate": mean_prompt_speedup(runs["generate"], runs["medusa"]),
            "mean_prompt_over_plain": mean_prompt_speedup(runs["plain"], runs["medusa"]),
        },
        "overhead": None if not plain or not medusa else medusa / plain,
        "step_ms": {"plain": plain and plain * 1000, "medusa": medusa and medusa * 1000},
        "step_time_shares": _shares(runs["medusa"]),
        "losslessness": {
            "over_plain": _lossless(model, prompts, runs["plain"][0], runs["medusa"][0]),
            "over_generate": _lossless(model, prompts, runs["generate"][0], runs["medusa"][0]),
        },
        "sample": _sample(tokenizer, questions, runs["medusa"][0]),
    }


def _by_depth(stats: DecodeStats, depth: int) -> dict[str, list[float | None]]:
    """Share of steps that accepted at least d drafts, of all steps and of those that accepted d - 1."""
    reached = [stats.accepted_at(d) for d in range(depth + 1)]
    return {
        "accepted_at_depth": [_ratio(reached[d], stats.steps) for d in range(1, depth + 1)],
        "accepted_at_depth_given_parent": [_ratio(reached[d], reached[d - 1]) for d in range(1, depth + 1)],
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _end_to_end(repeat: Sequence[Run]) -> float:
    return sum(len(run.ids[0]) for run in repeat) / sum(run.prefill_seconds + run.decode_seconds for run in repeat)


def _step_seconds(repeats: Sequence[Sequence[Run]]) -> float | None:
    """Median over repeats of seconds per step."""
    per_repeat = []
    for repeat in repeats:
        steps = sum(run.stats.steps for run in repeat)
        if steps:
            per_repeat.append(sum(run.decode_seconds for run in repeat) / steps)
    return statistics.median(per_repeat) if per_repeat else None


def _shares(repeats: Sequence[Sequence[Run]]) -> dict[str, float | None]:
    """Where a step's time goes."""
    counted = total([run for repeat in repeats for run in repeat])
    parts = ("draft", "forward", "verify", "commit")
    return {part: _ratio(getattr(counted, f"{part}_seconds"), counted.decode_seconds) for part in parts}


def _lossless(
    model: MedusaModel, prompts: Sequence[Tensor], reference: Sequence[Run], ours: Sequence[Run]
) -> dict[str, Any]:
    differences = []
    for number, (prompt, base, run) in enumerate(zip(prompts, reference, ours, strict=True)):
        if found := first_divergence(model.backbone, prompt, run.ids[0], base.ids[0]):
            differences.append({"prompt": number, **asdict(found)})
    return {"identical_share": 1 - len(differences) / len(prompts), "differences": differences}


def _sample(tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
    """A typical generation among the longer half, as pieces for colouring."""
    longer = sorted(range(len(runs)), key=lambda i: -len(runs[i].ids[0]))[: max(1, len(runs) // 2)]
    # The middle one by tokens per step: neither the luckiest nor the unluckiest.
    number = sorted(longer, key=lambda i: runs[i].stats.tokens_per_step or 0)[len(longer) // 2]
    pieces = []
    for step, (block,) in enumerate(runs[number].blocks):
        for place, token in enumerate(block.tokens):
            pieces.append({"text": tokenizer.decode([token]), "step": step, "drafted": place < block.drafted})
    return {
        "prompt": questions[number],
        "tokens_per_step": runs[number].stats.tokens_per_step,
        "pieces": pieces,
    }
