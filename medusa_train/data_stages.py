"""The stages that make what is learnt from: prompts, distill, cache."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from medusa_train.data.asking import Asking
from medusa_train.data.conversations import conversation_rows, tell, write_rows
from medusa_train.data.distill import Backend, check_splits, distill, failures
from medusa_train.data.hidden_states import KeptStates, is_whole, read_cache, shard_path, write_cache
from medusa_train.data.journal import ROWS
from medusa_train.data.prompts import check_prompt, gather_prompts, load_conversations, names_of
from medusa_train.data.rows import SPLITS, Prompt, Row, Split, append_jsonl, open_prompts, open_rows, read_prompts
from medusa_train.data.synthesis import synthesize_prompts
from medusa_train.data.transformers_backend import answer_here
from medusa_train.inference.backbone import Limits, read_limits
from medusa_train.inference.errors import UserError
from medusa_train.job import Job
from medusa_train.preflight import cache_bytes
from medusa_train.recipe import SYNTHESIZE
from medusa_train.run_folder import RunFolder

ROWS_PER_SHARD = 64


def run_prompts(job: Job) -> dict[str, Any]:
    """Write ``prompts/prompts.jsonl``."""
    data = job.recipe.data
    path = job.folder.begin("prompts") / "prompts.jsonl"
    if data.conversations:
        return {"prompts": 0, "source": names_of(data.sources("conversations"))}
    tokenizer = job.tokenizer  # first: it is small, and may have no chat template
    sources, synthesized = data.sources("prompts"), data.synthesized
    if synthesized and (found := namesake()):
        tqdm.write(f"prompts: {found}")
    if not sources:
        _synthesize(job, path, synthesized, frozenset())
        return {"prompts": len(read_prompts(path)), "source": SYNTHESIZE}
    skipped, seen = Counter[str](), set[int]()
    path.unlink(missing_ok=True)
    rest = None if data.num_prompts is None else data.num_prompts - synthesized
    written = _append(
        path,
        gather_prompts(
            sources, rest, job.recipe.seed, data.on_bad_rows, skipped, partial(check_prompt, tokenizer), seen
        ),
    )
    if skipped:
        tqdm.write(f"prompts: records left out: {tell(skipped)}")
    result: dict[str, Any] = {"prompts": written, "source": names_of(sources)}
    if synthesized:
        # Behind the files, so that hours of writing are not lost on a bad record; in a file of its own, so that what
        # was written before a kill stays while the files are read again.
        own = path.with_name("synthesized.jsonl")
        _synthesize(job, own, synthesized, seen)
        written += _append(path, open_prompts(own))
        result |= {"prompts": written, "source": f"{names_of(sources)}, {SYNTHESIZE}", "synthesized": synthesized}
    left_out = {"left_out": skipped.total(), "reasons": skipped.most_common()} if skipped else {}
    return result | left_out


def _synthesize(job: Job, path: Path, count: int, taken: Container[int]) -> None:
    data = job.recipe.data
    topics = _topics(data.prompt_topics)
    synthesize_prompts(
        job.backbone, job.tokenizer, path, count, data.prompt_max_tokens, data.prompt_temperature, data.prompt_top_k,
        data.batch_size, job.recipe.seed, topics, taken,
    )  # fmt: skip


def namesake() -> str | None:
    """What to tell of a file or folder that has the name of prompts which the backbone writes."""
    if not Path(SYNTHESIZE).exists():
        return None
    return (
        f"data.prompts={SYNTHESIZE} lets the backbone write prompts; what has this name here is not read, name it "
        f"./{SYNTHESIZE} for that"
    )


def _append(path: Path, prompts: Iterable[Prompt]) -> int:
    """Write prompts a thousand at a time; returns how many there were."""
    written, waiting = 0, iter(prompts)
    while some := list(islice(waiting, 1000)):
        append_jsonl(path, some)
        written += len(some)
    return written


def _topics(given: list[str] | str | None) -> list[str]:
    if not isinstance(given, str):
        return given or []
    try:
        lines = Path(given).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"data.prompt_topics={given}: {why}; name a text file with one topic a line") from error
    topics = [line.strip() for line in lines if line.strip()]
    if not topics:
        raise UserError(f"data.prompt_topics={given}: the file holds no topic; write one a line")
    return topics


def run_distill(job: Job) -> dict[str, Any]:
    """Write ``distill/rows.jsonl``, and ``distill/states/`` for the cache, which online training hardly has."""
    data, folder, state = job.recipe.data, job.folder, PartialState()
    stage = folder.stage("distill")
    if state.is_main_process:
        folder.begin("distill")
    state.wait_for_everyone()
    path = stage / ROWS
    if data.conversations:
        if state.is_main_process:
            skipped = Counter[str]()
            given = load_conversations(data.sources("conversations"), data.on_bad_rows, skipped)
            rows = conversation_rows(
                job.tokenizer, given, data.max_length, data.calibration_share, data.heldout_share, skipped
            )
            write_rows(path, rows, skipped)
            check_splits(path)
        state.wait_for_everyone()
    else:
        limits = read_limits(job.recipe.backbone.source, job.recipe.backbone.trust_remote_code)
        asking = Asking(
            job.tokenizer, open_prompts(folder.stage("prompts") / "prompts.jsonl"), data.max_new_tokens,
            limits.max_positions, data.answer_tokens, data.calibration_share, data.heldout_share, data.temperatures,
            job.recipe.seed,
        )  # fmt: skip
        distill(asking, stage, _backend(job, limits), job.retry_failed)
    return _count_rows(stage) if state.is_main_process else {}


def reopen_distillation(folder: RunFolder, overwrite: bool) -> None:
    """Let a finished distill stage ask those prompts again that failed.

    Raises:
        UserError: later stages were made of the rows as they are, and ``overwrite`` does not let them go.
    """
    stage = folder.stage("distill")
    if not folder.done("distill") or not failures(stage):
        return
    made = [name for name in ("cache", "train", "tree", "eval") if folder.stage(name).exists()]
    if made and not overwrite:
        raise UserError(
            f"{folder.stage(made[0])} was made of the rows without those that failed; use --overwrite to make it and "
            "what follows anew"
        )
    folder.remove_from("cache")
    (stage / "run.json").unlink()


def _backend(job: Job, limits: Limits) -> Backend:
    data = job.recipe.data
    if data.backend == "transformers":
        states = job.folder.stage("distill") / "states" if job.recipe.training.mode == "cached" else None
        return answer_here(job.backbone, data.batch_size, states)
    if PartialState().num_processes > 1:
        raise UserError(
            "data.backend=openai asks its servers from one process; run medusa-train distill without a launch"
        )
    from medusa_train.data.openai_backend import Servers, answer_by_servers

    section = data.server
    servers = Servers(
        section.urls, section.model or job.recipe.backbone.source, section.api, section.concurrency, section.timeout,
        section.retries, data.drop_mismatched,
    )  # fmt: skip
    return answer_by_servers(servers, limits)


def _count_rows(stage: Path) -> dict[str, Any]:
    rows, tokens, cut, splits = 0, 0, 0, Counter[str]()
    for row in open_rows(stage / ROWS):
        rows, tokens, cut = rows + 1, tokens + row.learnt_tokens, cut + (row.finish_reason == "length")
        splits[row.split] += 1
    failed, skipped = failures(stage).total(), failures(stage, skipped=True).total()
    return {
        "rows": rows,
        "answer_tokens": tokens,
        "cut_by_length": cut,
        **({"failed": failed} if failed else {}),
        **({"skipped": skipped} if skipped else {}),
        **{f"{split}_rows": splits[split] for split in SPLITS},
    }


def run_cache(job: Job) -> dict[str, Any]:
    """Write ``cache/<split>/shard-*.safetensors``; takes over what distillation kept, and removes it there.

    Online training needs no hidden states of its own rows.
    """
    folder, states, state = job.folder.stage("cache"), job.folder.stage("distill") / "states", PartialState()
    if state.is_main_process:
        job.folder.begin("cache")
    state.wait_for_everyone()
    data, kept = job.recipe.data, KeptStates(states)
    splits = [split for split in SPLITS if split != "train" or job.recipe.training.mode == "cached"]
    rows = {split: job.rows(split) for split in splits}
    _check_disk(job, folder, rows)
    for split in splits:
        write_cache(
            job.backbone, rows[split], kept, folder / split, data.cache_batch_tokens, ROWS_PER_SHARD, split,
            data.cache_dtype, state.process_index, state.num_processes,
        )  # fmt: skip
    state.wait_for_everyone()
    if not state.is_main_process:
        return {}
    shutil.rmtree(states, ignore_errors=True)  # twice the disk is used until here, and not for longer
    positions = {split: sum(len(shard.tokens) for shard in read_cache(folder / split)) for split in splits}
    return positions | {"backbone_probe": list(job.backbone.probe)}


def _check_disk(job: Job, folder: Path, rows: Mapping[Split, Sequence[Row]]) -> None:
    """Say how large the cache will be, and refuse to begin one that cannot end.

    Raises:
        UserError: the disk is too small.
    """
    if not PartialState().is_main_process:
        return
    waiting = 0
    for split, members in rows.items():
        for number, row in enumerate(members):
            if number % ROWS_PER_SHARD == 0:
                there = is_whole(shard_path(folder / split, number // ROWS_PER_SHARD))
            waiting += 0 if there else row.learnt_tokens
    needed = cache_bytes(waiting, job.backbone.hidden_size, job.recipe.data.cache_dtype)
    free = shutil.disk_usage(folder).free
    tqdm.write(f"cache: {waiting} positions, {needed / 1e9:.2f} GB; {free / 1e9:.1f} GB are free")
    if needed > free:
        raise UserError(
            f"the hidden states of {waiting} positions take {needed / 1e9:.1f} GB, and the disk of {folder} has "
            f"{free / 1e9:.1f} GB free; free some, use data.cache_dtype=float8, fewer prompts or training.mode=online"
        )
