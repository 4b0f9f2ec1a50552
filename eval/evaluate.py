"""One evaluation: everything that a report states, measured on held-out prompts or a benchmark.

What each figure means is part of the result, so that a number never travels without its definition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import Span
from medusa_train.data.hidden_states import Shard, shard_of
from medusa_train.data.rows import Row
from medusa_train.eval.acceptance import Ranks, recalls, replay, token_ranks
from medusa_train.eval.answers import Answer, AnswerFile, Answers, Ask, fits, local_ask, prompt_ids
from medusa_train.eval.arms import BATCH_OF_ONE, NEED_DRAFT_MODEL, SERVER, make_decoder
from medusa_train.eval.collect import collect
from medusa_train.eval.cost import bytes_read
from medusa_train.eval.figures import (
    acceptance,
    batch_speed_row,
    categories,
    part_shares,
    ratio,
    speed_row,
    speedup,
    step_model,
    step_seconds,
    tokens_per_step,
    total,
    warnings,
)
from medusa_train.eval.lossless import compare_outputs, read_again
from medusa_train.eval.questions import Question, spread
from medusa_train.eval.report import SCHEMA
from medusa_train.eval.server import Server
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.tree import Tree

PASS_TOKENS = 2048  # padded tokens of one pass when answers are read again

DEFINITIONS = {
    "timed prompts": "prompts that every arm answers in every repeat; all times, speeds, speedups and intervals are of "
    "these alone, and so is what stands beside them in the table of arms",
    "counted prompts": "all prompts; the heads answer those that are not timed once, and acceptance, histogram, "
    "categories' tokens per step and the reading are of all",
    "tokens_per_step": "tokens emitted by steps / steps, all prompts together; a step is one backbone pass after "
    "prefill, the bonus token counts, prefill's token does not, a block cut by the budget or an end token counts what "
    "was emitted; plain = 1",
    "accepted_drafts_per_step": "tokens_per_step - 1",
    "accepted_at_depth": "share of all steps that accepted at least so many drafts; given_parent: of the steps that "
    "accepted one less",
    "accepted_per_drafted_node": "accepted drafts / drafted nodes of the tree; for a tree this is not an acceptance "
    "rate, since only one path can be accepted",
    "speedup": "decode tokens/s of an arm / decode tokens/s of the baseline: all tokens / all time from the first "
    "token to the last, prefill and warm-up not in it; median over repeats, each a ratio of runs that took turns",
    "interval": "95 % percentile interval of the speedup, prompts drawn anew in pairs 2,000 times",
    "mean_prompt_speedup": "mean over prompts of tokens/s, over the same mean of the baseline: what Spec-Bench states",
    "batches": "the same prompts and conversations, several answered together; tokens/s of all rows together, from the "
    "first tokens to the end of the longest row; medians, lowest and highest over repeats; only full batches count",
    "overhead": "seconds per medusa step / seconds per plain step; in the model, as timed when the tree was chosen",
    "modelled speedup": "tokens per step / overhead",
    "simulated": "greedy decoding replayed on the backbone's states along its own answers to these prompts",
    "replay": "greedy decoding replayed on cached held-out answers: what the heads' ranks give this tree",
    "read again": "share of prompts whose every answered token is the backbone's own best when answers are read in one "
    "pass each: greedy text, proved without decoding it a second time; where one is not, how far below the best it was",
    "recall": "share of tokens among a head's best 1, 5 and 10, on the backbone's own greedy text",
}


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        asked: where the questions are from, for people.
        arms: names; see `arms`.
        timed: how many questions every arm answers in every repeat, spread over categories; None: all. The heads
            answer the others once, to be counted.
        load_draft_model: a small model for the arms that use one; None where none is given.
        server: for the arm ``openai``.
        batch_sizes: prompts that are answered together for times; above 1, in full batches of the timed ones.
        step_seconds: tokens per pass -> seconds of a step at batch size 1, timed when the tree was chosen.
        compared: the chosen tree beside others, as the tree stage wrote them.
    """

    questions: Sequence[Question]
    asked: str
    arms: Sequence[str]
    max_new_tokens: int
    repeats: int
    timed: int | None
    batch_sizes: Sequence[int]
    load_draft_model: Callable[[], Backbone | None]
    server: Server | None
    step_seconds: dict[int, float]
    compared: Sequence[dict[str, Any]]


def evaluate(
    model: MedusaModel, tokenizer: PreTrainedTokenizerBase, heldout: Sequence[Shard], plan: Plan, kept: AnswerFile
) -> dict[str, Any]:
    """Ask every question of every arm and put the figures together; see ``DEFINITIONS``.

    Args:
        heldout: cached answers to the run's held-out prompts, for recall and replay.
        kept: answers of an evaluation that was killed, and of this one.

    Raises:
        UserError: no question fits the backbone's context, or every answer ends with its first token.
    """
    started = time.perf_counter()
    room = [fits(prompt_ids(question, tokenizer), plan.max_new_tokens, model.backbone) for question in plan.questions]
    questions = [question for question, enough in zip(plan.questions, room, strict=True) if enough]
    if not questions:
        raise UserError(
            f"no prompt of {plan.asked} leaves room for eval.max_new_tokens={plan.max_new_tokens} within the "
            f"backbone's {model.backbone.max_positions} positions; lower it or ask something shorter"
        )
    asks, refused = _asks(model, tokenizer, plan)
    compiled = [arm for arm in asks if model.step.compiled and not arm.startswith(("generate", SERVER))]
    timed = spread(questions, plan.timed)
    wanted = sorted({size for size in plan.batch_sizes if size > 1})
    batched = [arm for arm in asks if arm not in (*BATCH_OF_ONE, SERVER)]
    refused |= {f"{size} prompts together": f"{len(timed)} are timed" for size in wanted if size > len(timed)}
    together = {1: list(asks)} | {size: batched for size in wanted if size <= len(timed)}
    collected = collect(
        asks, questions, timed, plan.max_new_tokens, plan.repeats, kept, together, needed=("medusa",), compiled=compiled
    )
    answers, counted = collected.timed[1], collected.counted["medusa"]
    bases: dict[str, Answers | None] = {"generate": answers.get("generate"), "plain": answers.get("plain")}
    medusa, plain = answers["medusa"], bases["plain"]
    accepted = acceptance(counted, model.tree.depth, model.tree.size)
    ranks = token_ranks(model, heldout)
    predicted = replay(ranks, model.tree)
    over = {name: speedup(base, medusa) if base else None for name, base in bases.items()}
    plain_step, medusa_step = step_seconds(plain) if plain else None, step_seconds(medusa)
    steps = plan.step_seconds
    overhead = ratio(steps[model.tree.size], steps[1]) if {1, model.tree.size} <= steps.keys() else None
    shard = shard_of(model.backbone, rows_of(counted), PASS_TOKENS)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "definitions": DEFINITIONS,
        "verifier": "greedy: exact, the output is that of plain greedy decoding",
        "setting": {
            "backbone": model.backbone.source,
            "dtype": str(model.backbone.dtype).removeprefix("torch."),
            "device": str(model.backbone.device),
            "batch_size": 1,
            "temperature": 0,
            "asked": plan.asked,
            "prompts": len(questions),
            "timed_prompts": len(timed),
            "left_out": len(plan.questions) - len(questions),
            "turns": sum(len(answer.turns) for answer in counted),
            "prompt_tokens": [len(answer.turns[0].prompt) for answer in counted],
            "max_new_tokens": plan.max_new_tokens,
            "repeats": plan.repeats,
            "compiled": model.step.compiled,
            "kind": model.heads.config.kind,
            "num_heads": model.heads.config.num_heads,
            "num_layers": model.heads.config.num_layers,
            "draft_vocab_size": model.heads.config.draft_vocab_size,
            "reads_copies": model.heads.config.reads_copies,
            "pass_bytes": {"backbone": bytes_read(model.backbone.model), "heads": bytes_read(model.heads)},
            "tree_size": model.tree.size,
            "tree_paths": [list(path) for path in model.tree.paths if path],
            "batch_trees": {
                rows: [list(path) for path in tree.paths if path] for rows, tree in model.batch_trees.items()
            },
        },
        "acceptance": accepted,
        "simulated": simulated(token_ranks(model, [shard]), model.tree, accepted["tokens_per_step"]),
        "replay": {
            "tokens_per_step": predicted.tokens_per_step,
            "steps": predicted.steps,
            "answers": predicted.prefill_tokens,
        },
        "recall": recalls(ranks),
        "trees": [
            row | {"replayed": replay(ranks, Tree.from_paths(row["paths"])).tokens_per_step} for row in plan.compared
        ],
        "speed": {arm: speed_row(found, bases) for arm, found in answers.items()},
        "batches": [_batch(model, size, found) for size, found in collected.timed.items() if size > 1],
        "unavailable": refused | collected.unavailable,
        "speedup": {f"over_{name}": value for name, value in over.items()},
        "overhead": None if not plain_step or not medusa_step else medusa_step / plain_step,
        # Of the timed questions on both sides: others may be easier or harder.
        "model": step_model(tokens_per_step(medusa[0]), overhead, over["plain"]["median"] if over["plain"] else None),
        "step_time_shares": part_shares(medusa),
        "losslessness": {
            f"over_{name}": compare_outputs(model.backbone, base[0], medusa[0]) if base else None
            for name, base in bases.items()
        },
        "read_again": read_again(model.backbone, shard, counted),
        "categories": categories(questions, answers, collected.counted),
        "sample": typical_generation(tokenizer, questions, counted),
    }
    for arm, row in report["speed"].items():
        same = compare_outputs(model.backbone, plain[0], answers[arm][0]) if plain and arm != SERVER else None
        row["identical_to_plain"] = same and same["identical_share"]
    report["warnings"] = warnings(report)
    seconds = time.perf_counter() - started
    report["evaluation"] = {"decoding_seconds": collected.seconds, "wall_seconds": seconds}
    return report


def _asks(model: MedusaModel, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> tuple[dict[str, Ask], dict[str, str]]:
    """What can be asked, and why the rest cannot."""
    asks: dict[str, Ask] = {}
    refused: dict[str, str] = {}
    draft_model = cache(plan.load_draft_model)
    for arm in plan.arms:
        try:
            if arm == SERVER:
                if plan.server is None:
                    raise UserError("eval.server_url and eval.server_model are needed")
                asks[arm] = plan.server.ask
            else:
                small = draft_model() if arm in NEED_DRAFT_MODEL else None
                asks[arm] = local_ask(make_decoder(arm, model, small), model.backbone, tokenizer)
        except UserError as error:
            refused[arm] = str(error)
    return asks, refused


def _batch(model: MedusaModel, size: int, answers: dict[str, Answers]) -> dict[str, Any]:
    """Every arm's speed with so many prompts answered together."""
    bases = {name: answers.get(name) for name in ("generate", "plain")}
    arms = {}
    for arm, found in answers.items():
        same = compare_outputs(model.backbone, bases["plain"][0], found[0]) if bases["plain"] else None
        arms[arm] = batch_speed_row(found, bases) | {"identical_to_plain": same and same["identical_share"]}
    prompts, tree = len(next(iter(answers.values()))[0]), model.drafter.tree_for(size)
    return {"batch_size": size, "prompts": prompts, "tree_size": tree.size, "arms": arms}


def rows_of(answers: Sequence[Answer]) -> list[Row]:
    """The turns as rows, in order, to be read again: a turn that the next one's prompt begins with is read there."""
    rows = []
    for answer in answers:
        spans: list[Span] = []
        for number, turn in enumerate(answer.turns):
            text = turn.prompt + turn.ids
            spans.append((len(turn.prompt), len(text)))
            following = answer.turns[number + 1 : number + 2]
            if not following or following[0].prompt[: len(text)] != text:
                rows.append(Row(f"{answer.question}-{number}", "heldout", [], text, spans, "stop"))
                spans = []
    return rows


def simulated(ranks: Ranks, tree: Tree, measured: float | None) -> dict[str, Any]:
    """What the heads' ranks along the answers give the tree; it should be what decoding measured."""
    tokens = replay(ranks, tree).tokens_per_step
    return {
        "tokens_per_step": tokens,
        "difference": tokens / measured - 1 if tokens and measured else None,
        "recall": recalls(ranks),
    }


def typical_generation(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], answers: Sequence[Answer]
) -> dict[str, Any]:
    """A typical generation among the longer half, as pieces for colouring."""
    turns = [answer.turns[0] for answer in answers]
    speeds = [total([answer]).tokens_per_step or 0 for answer in answers]
    longer = sorted(range(len(turns)), key=lambda i: -turns[i].tokens)[: max(1, len(turns) // 2)]
    # The middle one by tokens per step: neither the luckiest nor the unluckiest.
    number = sorted(longer, key=lambda i: speeds[i])[len(longer) // 2]
    pieces: list[dict[str, Any]] = []
    ids = iter(turns[number].ids)
    for step, (count, drafted) in enumerate(turns[number].blocks):
        pieces += [
            {"text": tokenizer.decode([next(ids)]), "step": step, "drafted": place < drafted} for place in range(count)
        ]
    return {
        "prompt": questions[number].messages[-1]["content"],
        "tokens_per_step": speeds[number],
        "pieces": pieces,
    }
