"""Where prompts come from: the backbone itself, a file, or a dataset.

A chat model asked to continue right behind the template's opening of a user turn writes what users wrote in its
training data. That needs no prompt file, and the prompts come from the model's own distribution.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import user_turn_opening
from medusa_train.data.generation import generate_batch
from medusa_train.data.rows import Prompt, append_jsonl, drop_torn_tail, read_prompts
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError

MIN_WORDS = 4
MAX_BATCHES_PER_PROMPT = 4  # a model that mostly writes fragments or repeats itself is given up on


def synthesize_prompts(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    count: int,
    max_tokens: int,
    temperature: float,
    top_k: int,
    batch_size: int,
    seed: int,
) -> None:
    """Let the backbone write user turns into ``path`` until it holds ``count``; continues what is there.

    Kept are turns that the model ended itself, of at least ``MIN_WORDS`` words, that no earlier one equals up to case
    and spaces. Batch b is drawn with a seed of its own, so a resumed run writes what an unbroken one would.

    Raises:
        UserError: the model does not write enough usable prompts.
    """
    drop_torn_tail(path)
    opening, turn_end = user_turn_opening(tokenizer)
    seen = {normalized(prompt) for prompt in read_prompts(path)}
    stops = sorted({turn_end, *backbone.eos_token_ids})
    with tqdm(total=count, initial=len(seen), desc="prompts", unit="prompt") as bar:
        batch = len(seen) // batch_size
        last = batch + MAX_BATCHES_PER_PROMPT * (count // batch_size + 2)
        while len(seen) < count:
            if batch == last:
                raise UserError(
                    f"the backbone wrote only {len(seen)} usable prompts of the {count} wanted; "
                    "lower data.num_prompts or name a prompt file in data.prompts"
                )
            turns = generate_batch(
                backbone, [opening] * batch_size, max_tokens, stops, temperature, top_k, seed=seed * 100_003 + batch
            )
            fresh = []
            for ids in turns:
                if ids[-1] not in stops:
                    continue  # a fragment: it never ended its turn
                text = tokenizer.decode(ids[:-1], skip_special_tokens=True).strip()
                prompt = Prompt.of([{"role": "user", "content": text}])
                if len(text.split()) >= MIN_WORDS and normalized(prompt) not in seen and len(seen) < count:
                    seen.add(normalized(prompt))
                    fresh.append(prompt)
            append_jsonl(path, fresh)
            bar.update(len(fresh))
            batch += 1


def normalized(prompt: Prompt) -> str:
    """A prompt's text up to case and spaces; equal texts are duplicates."""
    return "\n".join(" ".join(message["content"].lower().split()) for message in prompt.messages)


def load_prompts(source: str, split: str, limit: int | None) -> list[Prompt]:
    """Prompts from a JSONL, JSON or Parquet file, or a Hub dataset; duplicates dropped.

    What a record holds: see `prompt_of`.

    Raises:
        UserError: the source cannot be read, holds nothing, or has neither field.
    """
    prompts: dict[str, Prompt] = {}
    for record in load_records(source, split):
        if messages := prompt_of(record, source):
            prompt = Prompt.of(messages)
            prompts.setdefault(normalized(prompt), prompt)
        if limit and len(prompts) == limit:
            break
    if not prompts:
        raise UserError(f"data.prompts={source} holds no prompt; give at least one record")
    return list(prompts.values())


def prompt_of(record: Mapping[str, Any], source: str) -> list[dict[str, str]]:
    """A record's conversation without a final assistant turn (the backbone writes its own); empty without text.

    A record holds ``messages``, ``prompt``, or ``turns`` (a list of user turns as in MT-Bench and Spec-Bench, of which
    the first is taken).
    """
    messages = _messages(record, source)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages if messages and messages[-1]["content"].strip() else []


def load_conversations(source: str, split: str) -> Iterator[list[dict[str, str]]]:
    """Finished conversations from a file or Hub dataset: ``messages``, or ``prompt`` with ``completion``."""
    for record in load_records(source, split):
        messages = _messages(record, source)
        # Files that mix both kinds of record give every record both fields, one of them null.
        if not record.get("messages") and isinstance(record.get("completion"), str):
            messages.append({"role": "assistant", "content": record["completion"]})
        yield messages


def load_records(source: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Records of a file (by its ending) or of a Hub dataset.

    Raises:
        UserError: no such file or dataset, an unknown ending, or an empty or damaged file.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    path = Path(source).expanduser()
    loaders = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    loader = loaders.get(path.suffix)
    if path.suffix and loader is None and (path.exists() or path.is_absolute()):
        raise UserError(f"prompts {source}: files end in {', '.join(loaders)}")
    if loader and not path.is_file():
        raise UserError(f"prompts {source}: no such file")
    if loader and path.stat().st_size == 0:
        raise UserError(f"prompts {source}: the file is empty; give at least one record")
    try:
        if loader:
            records = load_dataset(loader, data_files=str(path), split="train")
        else:
            records = load_dataset(source, split=split)
    except (DatasetNotFoundError, DatasetGenerationError, OSError, ValueError) as error:
        where = _damaged_line(path) if path.suffix == ".jsonl" else None
        reason = where or " ".join(str(error).split())[:200]
        raise UserError(f"cannot read prompts from {source}: {reason}") from error
    yield from records


def _damaged_line(path: Path) -> str | None:
    """What is wrong with a file of JSON lines; None if every line is a JSON object."""
    records = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            records += 1
            try:
                if not isinstance(json.loads(line.rstrip()), dict):
                    return f"line {number} is not an object; write one {{...}} per line"
            except json.JSONDecodeError as error:
                return f"line {number}, column {error.colno}: {error.msg}; correct or remove that line"
    return None if records else "it holds blank lines only; give at least one record"


def _messages(record: Mapping[str, Any], source: str) -> list[dict[str, str]]:
    if record.get("messages"):
        for message in record["messages"]:
            if not {"role", "content"} <= message.keys():
                found = ", ".join(sorted(message))
                raise UserError(f"prompts {source}: a message needs 'role' and 'content', found {found}")
        return [{"role": str(message["role"]), "content": str(message["content"])} for message in record["messages"]]
    if record.get("turns"):
        return [{"role": "user", "content": str(record["turns"][0])}]
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    found = ", ".join(sorted(record))
    raise UserError(f"prompts {source}: a record needs 'messages', 'prompt' or 'turns', found {found}")
