"""The tree stage: which tree suits these heads on this device."""

from __future__ import annotations

import shutil
from typing import Any

import torch
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
    TreeChoice,
    best_tree,
    choose_tree,
    count_prefixes,
    expected_tokens,
    independent_tree,
    rank_shares,
)
from medusa_train.inference.adaptive import Calibration
from medusa_train.inference.checkpoint import save_tree
from medusa_train.inference.files import write_json
from medusa_train.inference.tree import Tree
from medusa_train.job import Job

STEP_TIME_CONTEXT = 96  # tokens already read when steps are timed; steps stay in one bucket of compiled shapes
CUSTOMARY_SIZE = 64  # tokens per pass of the list of 63 nodes that the original Medusa uses for every model


def run_tree(job: Job) -> dict[str, Any]:
    """Choose the tree, unless the recipe gives it; write it, and what adaptive drafting needs.

    Step times are measured either way, because adaptive drafting chooses among sizes while it decodes.
    """
    section, folder = job.recipe.inference, job.folder
    stage = folder.begin("tree")
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
    timed = dict(sorted(({customary.size: customary} | candidates).items()))
    prompt = torch.tensor(job.rows("calibration")[0].input_ids[:STEP_TIME_CONTEXT])
    rounds = measure_step_seconds(
        model, list(timed.values()), prompt, section.step_time_steps, section.step_time_rounds
    )
    times = fit_step_times(rounds)
    # A tree from the recipe may use ranks that the search leaves out.
    widest = max([max_rank, *(given.ranks_needed() if given else ())])
    counted = prefixes if widest == max_rank else count_prefixes(ranks.calibration(), widest)
    choices = {
        size: TreeChoice(tree, expected_tokens(counted, tree), seconds)
        for (size, tree), seconds in zip(timed.items(), times.seconds, strict=True)
    }
    offered = {trees[size].size for size in section.tree_sizes}
    chosen = given or choose_tree([choices[size] for size in sorted(offered)], times.noise).tree
    largest = max(trees.values(), key=lambda tree: tree.size)
    step_seconds = {size: choices[size].step_seconds for size in sorted(candidates) if size <= largest.size}
    save_tree(folder.heads, chosen, Calibration(largest, fit_temperatures(model, shards), step_seconds))
    table = [
        {
            "size": size,
            "expected_tokens_per_step": choice.expected_tokens,
            "step_ms": choice.step_seconds * 1000,
            "measured_step_ms": min(found) * 1000,
            "expected_tokens_per_second": choice.tokens_per_second,
        }
        for (size, choice), found in zip(choices.items(), rounds, strict=True)
        if size in candidates
    ]
    compared = {
        "chosen": chosen,
        "independence-greedy, same size": independent_tree(rank_table, chosen.size),
        f"exact counts, {customary.size} tokens": best_tree(prefixes, customary.size),
        f"independence-greedy, {customary.size} tokens": customary,
    }
    write_json(stage / "sizes.json", table)
    rows: list[dict[str, Any]] = [
        {
            "tree": name,
            "size": tree.size,
            "expected_tokens_per_step": expected_tokens(counted, tree),
            # Step times are those of a size; few ranks may leave a tree with one that was not timed.
            "step_ms": choices[tree.size].step_seconds * 1000 if tree.size in choices else None,
            "paths": [list(path) for path in tree.paths if path],
        }
        for name, tree in compared.items()
    ]
    for row in rows:
        speed = 1000 * row["expected_tokens_per_step"] / row["step_ms"] if row["step_ms"] else None
        tqdm.write(
            f"tree: {row['tree']}: {row['expected_tokens_per_step']:.2f} expected tokens per step"
            + (f", {speed:.1f} tokens/s" if speed else "")
        )
    return {
        "chosen_size": chosen.size,
        "chosen_by": "recipe" if given else "expected tokens per second",
        "step_time_noise": times.noise,
        "sizes": table,
        "compared": rows,
        "gains": [
            [list(path), counted.counts.get(path, 0) / max(1, counted.positions)] for path in chosen.paths if path
        ],
        "calibration_positions": prefixes.positions,
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
