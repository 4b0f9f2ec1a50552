"""Self-distillation: the backbone answers the prompts, and its own tokens become the training text.

What is asked is in `asking`; who answers is a backend, the model in this process (`transformers_backend`) or servers
(`openai_backend`); what became of every prompt is kept by a `Journal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from accelerate import PartialState
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.asking import Asking
from medusa_train.data.chat import encode_conversation
from medusa_train.data.journal import FAILURES, ROWS, WAITING, Failure, Journal
from medusa_train.data.progress import AnswerProgress
from medusa_train.data.prompts import load_conversations
from medusa_train.data.rows import SPLITS, JsonLines, Prompt, Row, append_jsonl, open_rows, split_of
from medusa_train.inference.errors import UserError

# Appends outcomes for all prompts in the order of asking; returns the prompts whose answers are wanted, in order.
Backend = Callable[[Asking, NDArray[np.int64], Journal, AnswerProgress], Sequence[int] | NDArray[np.int64]]


def distill(asking: Asking, folder: Path, backend: Backend, retry_failed: bool = False) -> None:
    """Answer the prompts into ``rows.jsonl`` of a folder; goes on with what is there.

    Every prompt that was asked ends either there or in ``failed.jsonl``, once, whatever came between. The rows are the
    same whatever order the answers came in.

    Args:
        retry_failed: ask those again that failed before.

    Raises:
        UserError: a split got no row, or the backend cannot go on.
    """
    state, ids = PartialState(), asking.ids()
    order = asking.order(ids)
    journal = Journal(folder, ids, state.process_index, retry_failed)
    state.wait_for_everyone()  # before anyone appends, every process has read what was there
    answered = int((journal.status != WAITING).sum())
    with AnswerProgress(len(ids), asking.answer_tokens, answered, int(journal.tokens.sum())) as progress:
        chosen = backend(asking, order, journal, progress)
    state.wait_for_everyone()
    if state.is_main_process:
        whole = Journal(folder, ids, state.process_index, retry_failed) if state.num_processes > 1 else journal
        whole.finish(chosen)
        _tell_failures(folder)
        total = int(whole.tokens[np.asarray(chosen, dtype=np.int64)].sum())
        if asking.answer_tokens is not None and total < asking.answer_tokens:
            tqdm.write(
                f"distill: the prompts gave {total} answer tokens of the {asking.answer_tokens} wanted; "
                "raise data.num_prompts"
            )
        check_splits(folder / ROWS)
    state.wait_for_everyone()


def failures(folder: Path) -> Counter[str]:
    """Reason -> prompts that failed for it."""
    records = JsonLines(folder / FAILURES, lambda record: Failure(**record))
    return Counter(record.failed for record in records) if len(records) else Counter()


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
    check_splits(path)


def _tell_failures(folder: Path) -> None:
    reasons = failures(folder)
    if not reasons:
        return
    for reason, count in reasons.most_common(5):
        tqdm.write(f"distill: {count} prompts failed: {reason}")
    tqdm.write(f"distill: all {reasons.total()} are in {folder / FAILURES}; --retry-failed asks them again")


def check_splits(path: Path) -> None:
    """Refuse rows that leave a split empty.

    Raises:
        UserError: they do; what to change is told.
    """
    found = {row.split for row in open_rows(path)}
    advice = {"train": "lower data.calibration_share and data.heldout_share"}
    for split in SPLITS:
        if split not in found:
            more = advice.get(split, f"raise data.{split}_share")
            raise UserError(f"no row fell into the {split} split; give more prompts or {more}")
