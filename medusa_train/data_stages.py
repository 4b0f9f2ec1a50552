"""The stages that make what is learnt from: prompts, distill, cache."""

from __future__ import annotations

import shutil
from typing import Any

from medusa_train.data.distill import distill, take_conversations
from medusa_train.data.hidden_states import KeptStates, read_cache, write_cache
from medusa_train.data.prompts import load_prompts, synthesize_prompts
from medusa_train.data.rows import SPLITS, append_jsonl, read_prompts, read_rows
from medusa_train.job import Job

ROWS_PER_SHARD = 64


def run_prompts(job: Job) -> dict[str, Any]:
    """Write ``prompts/prompts.jsonl``."""
    data = job.recipe.data
    path = job.folder.begin("prompts") / "prompts.jsonl"
    if data.conversations:
        return {"prompts": 0, "source": data.conversations}
    if data.prompts == "synthesize":
        tokenizer = job.tokenizer  # first: it is small, and may have no chat template
        synthesize_prompts(
            job.backbone, tokenizer, path, data.num_prompts or 1000, data.prompt_max_tokens,
            data.prompt_temperature, data.prompt_top_k, data.batch_size, job.recipe.seed,
        )  # fmt: skip
    else:
        prompts = load_prompts(data.prompts, data.prompts_split, data.num_prompts)
        path.unlink(missing_ok=True)
        append_jsonl(path, prompts)
    return {"prompts": len(read_prompts(path)), "source": data.prompts}


def run_distill(job: Job) -> dict[str, Any]:
    """Write ``distill/rows.jsonl``, and ``distill/states/`` for the cache, which online training hardly has."""
    data, folder = job.recipe.data, job.folder
    stage = folder.begin("distill")
    path = stage / "rows.jsonl"
    if data.conversations:
        take_conversations(
            job.tokenizer, data.conversations, data.prompts_split, path, data.max_length,
            data.calibration_share, data.heldout_share,
        )  # fmt: skip
    else:
        tokenizer = job.tokenizer
        states = stage / "states" if job.recipe.training.mode == "cached" else None
        distill(
            job.backbone, tokenizer, read_prompts(folder.stage("prompts") / "prompts.jsonl"), path,
            states, data.answer_tokens, data.max_new_tokens, data.batch_size,
            data.calibration_share, data.heldout_share,
        )  # fmt: skip
    rows = read_rows(path)
    return {
        "rows": len(rows),
        "answer_tokens": sum(row.learnt_tokens for row in rows),
        "cut_by_length": sum(row.finish_reason == "length" for row in rows),
        **{f"{split}_rows": sum(row.split == split for row in rows) for split in SPLITS},
    }


def run_cache(job: Job) -> dict[str, Any]:
    """Write ``cache/<split>/shard-*.safetensors``; takes over what distillation kept, and removes it there.

    Online training needs no hidden states of its own rows.
    """
    folder, states = job.folder.begin("cache"), job.folder.stage("distill") / "states"
    kept = KeptStates(states)
    splits = [split for split in SPLITS if split != "train" or job.recipe.training.mode == "cached"]
    for split in splits:
        write_cache(
            job.backbone, job.rows(split), kept, folder / split, job.recipe.data.cache_batch_tokens, ROWS_PER_SHARD,
            split,
        )  # fmt: skip
    shutil.rmtree(states, ignore_errors=True)  # twice the disk is used until here, and not for longer
    positions = {split: sum(len(shard.tokens) for shard in read_cache(folder / split)) for split in splits}
    return positions | {"backbone_probe": list(job.backbone.probe)}
