"""Self-distillation: the backbone answers the prompts, and its own tokens become the training text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import encode_conversation, render_prompt
from medusa_train.data.generation import generate_batch
from medusa_train.data.hidden_states import keep_states
from medusa_train.data.prompts import load_conversations
from medusa_train.data.rows import SPLITS, Prompt, Row, Split, append_jsonl, drop_torn_tail, read_rows, split_of
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError


def distill(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    path: Path,
    states_folder: Path | None,
    answer_tokens: int | None,
    max_new_tokens: int,
    batch_size: int,
    calibration_share: float,
    heldout_share: float,
) -> None:
    """Append greedy answers to ``path`` until the prompts, or the wanted number of answer tokens, are used up.

    Token ids are stored as the model made them, so labels never depend on re-tokenizing text. Batches are fixed by
    the prompts alone. Each writes the hidden states of its answers to a file in ``states_folder`` (see `keep_states`),
    then appends its rows in one write: a row never comes without its states. A resumed run answers the batches that
    miss a row, as a whole and so exactly as an unbroken run, and appends only the missing rows.

    Args:
        states_folder: None keeps no states.
        answer_tokens: stop once this many have been written; None answers every prompt. Prompts of the calibration
            and held-out splits come first, so that stopping early never leaves those empty.
    """
    drop_torn_tail(path)
    done = {row.id: row for row in _existing(path)}
    splits = {prompt.id: split_of(prompt.id, calibration_share, heldout_share) for prompt in prompts}
    waiting, refused, too_long = [], 0, 0
    room = None if backbone.max_positions is None else backbone.max_positions - max_new_tokens
    # A prompt's id is a hash, so this order is a fixed shuffle.
    for prompt in sorted(prompts, key=lambda prompt: (splits[prompt.id] == "train", prompt.id)):
        try:
            ids = render_prompt(tokenizer, prompt.messages)
        except UserError:
            refused += 1
            continue
        if room is not None and len(ids) > room:
            too_long += 1
        else:
            waiting.append((ids, prompt))
    if refused:
        tqdm.write(f"distill: {refused} prompts that the chat template refuses were left out")
    if too_long:
        tqdm.write(f"distill: {too_long} prompts that leave no room for {max_new_tokens} tokens were left out")
    written, generated, started = 0, 0, time.perf_counter()
    with tqdm(total=len(waiting), desc="distill", unit="answer") as bar:
        for number, start in enumerate(range(0, len(waiting), batch_size)):
            if answer_tokens is not None and written >= answer_tokens:
                break
            members = waiting[start : start + batch_size]
            if any(prompt.id not in done for _, prompt in members):
                rows, states = _answer(backbone, members, splits, max_new_tokens)
                if states_folder:
                    keep_states(states_folder / f"batch-{number:05d}.safetensors", rows, states)
                missing = [row for row in rows if row.id not in done]
                append_jsonl(path, missing)
                done |= {row.id: row for row in missing}
                generated += sum(row.learnt_tokens for row in rows)
            # Counted batch by batch, also what was there before: a resumed run stops where an unbroken one would.
            written += sum(done[prompt.id].learnt_tokens for _, prompt in members)
            bar.update(len(members))
            if generated:
                # A line of its own, so that it stays in logs.
                rate = generated / (time.perf_counter() - started)
                wanted = written * len(waiting) / bar.n
                left = (min(wanted, answer_tokens or wanted) - written) / rate
                tqdm.write(
                    f"distill: {bar.n} of {len(waiting)} prompts, {written} answer tokens, {rate:.0f} tokens/s, "
                    f"{max(left, 0) / 60:.1f} minutes left"
                )
    if answer_tokens is not None and written < answer_tokens:
        tqdm.write(
            f"distill: the prompts gave {written} answer tokens of the {answer_tokens} wanted; raise data.num_prompts"
        )
    _check_splits(path)


def _answer(
    backbone: Backbone, batch: Sequence[tuple[list[int], Prompt]], splits: Mapping[str, Split], max_new_tokens: int
) -> tuple[list[Row], list[Tensor]]:
    """Rows, and for each the hidden states that its answer's tokens were chosen from."""
    eos = backbone.eos_token_ids
    states: list[list[Tensor]] = [[] for _ in batch]

    def keep(row: int, hidden: Tensor) -> None:
        states[row].append(hidden)

    answers = generate_batch(backbone, [ids for ids, _ in batch], max_new_tokens, eos, states=keep)
    rows = [
        Row(
            id=prompt.id,
            split=splits[prompt.id],
            messages=prompt.messages,
            input_ids=ids + answer,
            spans=[(len(ids), len(ids) + len(answer))],
            finish_reason="stop" if answer[-1] in eos else "length",
        )
        for (ids, prompt), answer in zip(batch, answers, strict=True)
    ]
    return rows, [torch.cat(pieces) for pieces in states]


def answer_again(
    backbone: Backbone, rows: Sequence[Row], path: Path, states_folder: Path, max_new_tokens: int, batch_size: int
) -> list[Row]:
    """The answers of a changed backbone to the prompts of distilled ``rows``; written and returned.

    Args:
        states_folder: gets their hidden states, as in `distill`.
    """
    path.unlink(missing_ok=True)
    answered: list[Row] = []
    for number, start in enumerate(tqdm(range(0, len(rows), batch_size), desc="answer again", unit="batch")):
        members = rows[start : start + batch_size]
        prompts = [(row.input_ids[: row.spans[0][0]], Prompt(row.id, row.messages)) for row in members]
        splits = {row.id: row.split for row in members}
        made, states = _answer(backbone, prompts, splits, max_new_tokens)
        keep_states(states_folder / f"batch-{number:05d}.safetensors", made, states)
        append_jsonl(path, made)
        answered += made
    return answered


def take_conversations(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    split: str,
    path: Path,
    max_length: int,
    calibration_share: float,
    heldout_share: float,
) -> None:
    """Write the rows of finished conversations instead of distilling; their assistant turns are learnt.

    Heads draft best on the backbone's own words, so this is for text that the backbone wrote elsewhere. Conversations
    longer than ``max_length`` tokens are cut there; those left without an assistant token are dropped and counted.
    """
    path.unlink(missing_ok=True)
    rows, dropped, refused = {}, 0, 0
    for messages in load_conversations(source, split):
        if not any(message["role"] == "assistant" for message in messages):
            dropped += 1
            continue
        try:
            ids, spans = encode_conversation(tokenizer, messages)
        except UserError:
            refused += 1
            continue
        spans = [(start, min(end, max_length)) for start, end in spans if start < max_length]
        if not spans:
            dropped += 1
            continue
        first_answer = next(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
        prompt_id = Prompt.of(messages[:first_answer]).id
        row = Row(
            id=Prompt.of(messages).id,
            # By the prompt, so that two answers to one question never stand on both sides of the split.
            split=split_of(prompt_id, calibration_share, heldout_share),
            messages=messages[:first_answer],
            input_ids=ids[:max_length],
            spans=spans,
            finish_reason="given",
        )
        rows[row.id] = row
    if not rows:
        raise UserError(
            f"data.conversations={source}: none of {dropped + refused} records has an assistant turn to learn from"
        )
    if dropped:
        tqdm.write(f"distill: {dropped} conversations without an assistant token were left out")
    if refused:
        tqdm.write(f"distill: {refused} conversations that the chat template refuses were left out")
    append_jsonl(path, rows.values())
    _check_splits(path)


def _existing(path: Path) -> list[Row]:
    return read_rows(path) if path.exists() and path.stat().st_size else []


def _check_splits(path: Path) -> None:
    rows = read_rows(path)
    advice = {"train": "lower data.calibration_share and data.heldout_share"}
    for split in SPLITS:
        if not any(row.split == split for row in rows):
            more = advice.get(split, f"raise data.{split}_share")
            raise UserError(f"no row fell into the {split} split; give more prompts or {more}")
