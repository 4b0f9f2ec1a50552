"""The tree stage: which tree suits these heads on this device."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from medusa_train.data.hidden_states import KeptStates, write_cache
from medusa_train.data.rows import SPLITS
from medusa_train.data.transformers_backend import answer_again
from medusa_train.data_stages import ROWS_PER_SHARD
from medusa_train.eval.acceptance import token_ranks
from medusa_train.eval.calibration import fit_temperatures
from medusa_train.eval.speed import measure_step_seconds
from medusa_train.eval.step_curve import fit_step_times
from medusa_train.eval.tree_search import (
    PrefixCounts,
    TreeChoice,
    best_nodes,
    best_tree,
    choice_reason,
    choose_tree,
    count_prefixes,
    expected_tokens,
    independent_tree,
    rank_shares,
)
from medusa_train.inference.adaptive import Calibration
from medusa_train.inference.checkpoint import TREE, save_tree
from medusa_train.inference.files import write_json
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.pass_size import TIMED_TEXT, reckon_seconds
from medusa_train.inference.tree import Tree
from medusa_train.job import Job
from medusa_train.recipe import InferenceSection

LONG_TEXT = 1024  # tokens behind which steps are timed again, for what text adds to them
RECKONED = (2, 4, 8, 16, 32)  # numbers of prompts that get a tree of their own, timed or not
CUSTOMARY_SIZE = 64  # tokens per pass of the list of 63 nodes that the original Medusa uses for every model


def run_tree(job: Job) -> dict[str, Any]:
    """Choose the tree, unless the recipe gives it; write it, and what adaptive drafting needs.

    Step times are measured either way, because adaptive drafting chooses among sizes while it decodes.
    """
    section, folder = job.recipe.inference, job.folder
    stage = folder.begin("tree")
    # What an earlier run chose is read with the heads, and this run is how a damaged file is mended.
    (folder.heads / TREE).unlink(missing_ok=True)
    model = job.medusa_model()
    if job.recipe.lora:
        _measure_again(job)
    shards = job.measured("calibration")
    ranks = token_ranks(model, shards)
    max_rank = min(section.max_rank, model.heads.config.projection_size)
    prefixes = count_prefixes(ranks.calibration(), max_rank)
    # One token per pass is always measured: it is what every tree is compared with.
    trees = {size: best_tree(prefixes, size) for size in sorted({1, *section.tree_sizes})}
    candidates = {tree.size: tree for tree in trees.values()}
    given = Tree.from_paths(section.tree) if section.tree is not None else None
    if given:
        given.check(model.heads.config.num_heads, model.heads.config.projection_size)
        candidates[given.size] = given
    rank_table = rank_shares(ranks.ranks, ranks.present, max_rank)
    customary = independent_tree(rank_table, CUSTOMARY_SIZE)
    # A tree from the recipe may use ranks that the search leaves out.
    widest = max([max_rank, *(given.ranks_needed() if given else ())])
    counted = prefixes if widest == max_rank else count_prefixes(ranks.calibration(), widest)
    # So is one row, from which other numbers of rows are reckoned.
    batches = sorted({1, *section.batch_sizes})
    cells = {(1, customary.size): customary}
    cells |= {(rows, tree.size): tree for rows in batches for tree in candidates.values()}
    prompt = torch.tensor(job.rows("calibration")[0].input_ids[:TIMED_TEXT])
    ladders = _time_ladders(model, cells, counted, prompt, section)
    offered = sorted({trees[size].size for size in section.tree_sizes})
    best = _best_by_rows(ladders, offered)
    if given:  # for every number of prompts
        chosen, batch_trees, told = given, {}, {1: "given by the recipe"}
    else:
        chosen, batch_trees = best[1].tree, {rows: one.tree for rows, one in best.items() if rows > 1}
        told = {rows: f"at batch size {rows}, {one.reason}" for rows, one in best.items()}
    largest = max(trees.values(), key=lambda tree: tree.size)
    kept = [size for size in sorted(candidates) if size <= largest.size]
    step_seconds = {
        rows: {size: ladder.choices[size].step_seconds for size in kept} for rows, ladder in ladders.items()
    }
    nodes = tuple(best_nodes(prefixes, largest.size - 1))
    timed = sorted({1, kept[len(kept) // 2], kept[-1]})
    text_seconds = _time_text(model, [candidates[size] for size in timed], prompt, batches[-1], section)
    calibration = Calibration(nodes, fit_temperatures(model, shards), step_seconds, text_seconds)
    save_tree(folder.heads, chosen, calibration, batch_trees, told)
    table = [
        {
            "batch_size": rows,
            "size": size,
            "expected_tokens_per_step": ladder.choices[size].expected_tokens,
            "step_ms": ladder.choices[size].step_seconds * 1000,
            "measured_step_ms": ladder.measured[size] * 1000,
            "expected_tokens_per_second": rows * ladder.choices[size].tokens_per_second,
            "chosen": size == batch_trees.get(rows, chosen).size,
        }
        for rows, ladder in ladders.items()
        for size in sorted(candidates)
    ]
    write_json(stage / "sizes.json", table)
    compared = {
        "chosen": chosen,
        "independence-greedy, same size": independent_tree(rank_table, chosen.size),
        f"exact counts, {customary.size} tokens": best_tree(prefixes, customary.size),
        f"independence-greedy, {customary.size} tokens": customary,
    }
    listed = [_listed(name, tree, counted, ladders[1]) for name, tree in compared.items()]
    for rows in batches:
        tqdm.write(f"tree: batch size {rows}: {best[rows].tree.size} tokens per pass, {best[rows].reason}")
    return {
        "chosen_size": chosen.size,
        "chosen_because": told[1],
        "given": given is not None,
        "step_time_noise": ladders[1].noise,
        "sizes": table,
        "best_sizes": [
            {"batch_size": rows, "size": best[rows].tree.size, "reason": best[rows].reason} for rows in batches
        ],
        "compared": listed,
        "gains": [
            [list(path), counted.counts.get(path, 0) / max(1, counted.positions)] for path in chosen.paths if path
        ],
        "calibration_positions": prefixes.positions,
    }


@dataclass(frozen=True)
class Ladder:
    """Trees of every size at one batch size.

    Attributes:
        choices: tokens per pass of a row -> the tree, what it yields and what it costs.
        measured: the same -> seconds of its best round, before they were levelled; empty where none was timed.
        noise: relative error of the step times.
    """

    choices: dict[int, TreeChoice]
    measured: dict[int, float]
    noise: float


def _time_ladders(
    model: MedusaModel,
    cells: Mapping[tuple[int, int], Tree],
    counted: PrefixCounts,
    prompt: Tensor,
    section: InferenceSection,
) -> dict[int, Ladder]:
    """Ladders by batch size, from cells that are named by rows and size; all are timed in turns."""
    rounds = measure_step_seconds(
        model, [(tree, [prompt] * rows) for (rows, _), tree in cells.items()], section.step_time_steps,
        section.step_time_rounds,
    )  # fmt: skip
    found = dict(zip(cells, rounds, strict=True))
    ladders = {}
    for batch in sorted({rows for rows, _ in cells}):
        sizes = sorted(size for rows, size in cells if rows == batch)
        times = fit_step_times([found[batch, size] for size in sizes])
        choices = {
            size: TreeChoice(cells[batch, size], expected_tokens(counted, cells[batch, size]), seconds)
            for size, seconds in zip(sizes, times.seconds, strict=True)
        }
        ladders[batch] = Ladder(choices, {size: min(found[batch, size]) for size in sizes}, times.noise)
    return ladders


def _time_text(
    model: MedusaModel, trees: Sequence[Tree], prompt: Tensor, rows: int, section: InferenceSection
) -> dict[int, float]:
    """`TextSeconds` from steps behind the prompt and behind a long text that repeats it, timed in turns."""
    limit = model.backbone.max_positions or LONG_TEXT * 2
    answer = section.step_time_steps * max(tree.depth + 1 for tree in trees) + 1
    length = min(LONG_TEXT, limit - answer)
    if length <= len(prompt):  # a context so short that its text adds nothing to speak of
        return {1: 0.0}
    texts = [prompt, prompt.repeat(1 + length // len(prompt))[:length]]
    rounds = measure_step_seconds(
        model, [(tree, [text] * rows) for tree in trees for text in texts], section.step_time_steps,
        section.step_time_rounds,
    )  # fmt: skip
    best = [min(found) for found in rounds]
    tokens = rows * (length - len(prompt))
    return {
        tree.size: max(0.0, long - short) / tokens
        for tree, short, long in zip(trees, best[::2], best[1::2], strict=True)
    }


@dataclass(frozen=True)
class Best:
    """The fastest tree for a number of rows, and why it is."""

    tree: Tree
    reason: str


def _best_by_rows(ladders: Mapping[int, Ladder], sizes: Sequence[int]) -> dict[int, Best]:
    """Of these sizes, for every number of rows that was timed or is reckoned."""
    best = {}
    for rows in sorted({*ladders, *RECKONED}):
        timed = rows in ladders
        ladder = ladders[rows] if timed else _reckoned(ladders, rows)
        choices = [ladder.choices[size] for size in sizes]
        choice = choose_tree(choices, ladder.noise)
        reason = choice_reason(choices, choice, ladder.noise)
        best[rows] = Best(choice.tree, reason if timed else f"reckoned from those timed, {reason}")
    return best


def _reckoned(ladders: Mapping[int, Ladder], rows: int) -> Ladder:
    """A ladder for a number of rows that was not timed, from those that were."""
    seconds = {
        batch: {size: choice.step_seconds for size, choice in ladder.choices.items()}
        for batch, ladder in ladders.items()
    }
    choices = {
        size: replace(choice, step_seconds=reckon_seconds(seconds, size, rows))
        for size, choice in ladders[1].choices.items()
    }
    return Ladder(choices, {}, max(ladder.noise for ladder in ladders.values()))


def _listed(name: str, tree: Tree, counted: PrefixCounts, ladder: Ladder) -> dict[str, Any]:
    """A tree beside others, told to people at once."""
    expected = expected_tokens(counted, tree)
    # Step times are those of a size; few ranks may leave a tree with one that was not timed.
    seconds = ladder.choices[tree.size].step_seconds if tree.size in ladder.choices else None
    speed = f", {expected / seconds:.1f} tokens/s a row" if seconds else ""
    tqdm.write(f"tree: {name}: {expected:.2f} expected tokens per step{speed}")
    return {
        "tree": name,
        "size": tree.size,
        "expected_tokens_per_step": expected,
        "step_ms": seconds and seconds * 1000,
        "paths": [list(path) for path in tree.paths if path],
    }


def _measure_again(job: Job) -> None:
    """Write what the adapted backbone answers to calibration and held-out prompts, and its states there.

    Conversations that were given keep their text.
    """
    data, stage = job.recipe.data, job.folder.stage("tree")
    for split in (split for split in SPLITS if split != "train"):
        rows, states = job.rows(split), stage / "states" / split
        shutil.rmtree(stage / split, ignore_errors=True)
        if not data.conversations:
            rows = answer_again(
                job.decoding_backbone, rows, stage / f"{split}.jsonl", states, data.max_new_tokens, data.batch_size
            )
        write_cache(
            job.decoding_backbone, rows, KeptStates(states), stage / split, data.cache_batch_tokens, ROWS_PER_SHARD,
            split, data.cache_dtype,
        )  # fmt: skip
    shutil.rmtree(stage / "states", ignore_errors=True)
