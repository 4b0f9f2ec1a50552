"""Rows of finished conversations, for text that the backbone wrote elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import Message, encode_conversation
from medusa_train.data.rows import Prompt, Row, append_jsonl, split_of
from medusa_train.inference.errors import UserError

ROWS_PER_WRITE = 1000


def conversation_row(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    max_length: int,
    calibration_share: float,
    heldout_share: float,
) -> Row:
    """The row of a conversation, cut at ``max_length`` tokens; it finishes by ``length`` if that cuts an answer.

    Raises:
        UserError: there is nothing to learn from it.
    """
    ids, spans = encode_conversation(tokenizer, messages)
    reached = [(start, end) for start, end in spans if start < max_length]
    if not reached:
        raise UserError("no assistant token before data.max_length")
    *whole, (start, end) = reached
    finish_reason = "length" if end > max_length else "given"
    first = next(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    # By the prompt, so that two answers to one question never stand on both sides of the split.
    split = split_of(Prompt.of(messages[:first]).id, calibration_share, heldout_share)
    return Row(
        id=Prompt.of(messages).id,
        split=split,
        messages=[dict(message) for message in messages[:first]],
        input_ids=ids[:max_length],
        spans=[*whole, (start, min(end, max_length))],
        finish_reason=finish_reason,
    )


def conversation_rows(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Sequence[Message]],
    max_length: int,
    calibration_share: float,
    heldout_share: float,
    skipped: Counter[str],
) -> Iterator[Row]:
    """Rows of conversations, each once; what gives none is counted by its reason in ``skipped``."""
    seen: set[int] = set()
    for messages in conversations:
        try:
            row = conversation_row(tokenizer, messages, max_length, calibration_share, heldout_share)
        except UserError as error:
            skipped[str(error)] += 1
            continue
        if int(row.id, 16) in seen:
            skipped["the same conversation again"] += 1
        else:
            seen.add(int(row.id, 16))
            yield row


def write_rows(path: Path, rows: Iterable[Row], skipped: Counter[str]) -> None:
    """Write rows as they come, a thousand in memory.

    Raises:
        UserError: there is none; the reasons are told.
    """
    path.unlink(missing_ok=True)
    waiting: list[Row] = []
    written = 0
    for row in rows:
        waiting.append(row)
        if len(waiting) == ROWS_PER_WRITE:
            append_jsonl(path, waiting)
            written, waiting = written + len(waiting), []
    append_jsonl(path, waiting)
    if not written + len(waiting):
        path.unlink()
        raise UserError(f"data.conversations holds nothing to learn from: {tell(skipped) or 'no record'}")
    if skipped:
        tqdm.write(f"distill: conversations left out: {tell(skipped)}")


def tell(skipped: Counter[str]) -> str:
    """Reasons and their counts in one line, the commonest first."""
    shown = [f"{count:,} ({reason})" for reason, count in skipped.most_common(4)]
    return ", ".join(shown) + (f", {len(skipped) - 4} more reasons" if len(skipped) > 4 else "")
