"""Prompts and conversations of files and data sets: which of their records are taken, each once."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import TOOLS, check_special_tokens
from medusa_train.data.records import BadRecord, Messages, conversation_of
from medusa_train.data.rows import Prompt
from medusa_train.data.sources import OnBad, Source, read_source
from medusa_train.inference.errors import UserError

REPEATED = "the same prompt again"


def gather_prompts(
    sources: Sequence[Source],
    count: int | None,
    seed: int,
    on_bad: OnBad,
    skipped: Counter[str],
    check: Callable[[Prompt], None] = lambda prompt: None,
    seen: set[int] | None = None,
) -> Iterator[Prompt]:
    """Distinct prompts of the sources, in their order; with ``count``, a sample of so many.

    The sample depends on the seed and on the prompts alone, not on their order; each source gives its share by weight,
    or all that it has. Only the sample, and eight bytes of each prompt, are in memory.

    Args:
        skipped: gets the records that are left out, by reason.
        check: raises `BadRecord` for a prompt that cannot be used.
        seen: gets the `prompt_key` of every prompt that was read, and holds those that are not taken again.

    Raises:
        UserError: a source cannot be read, or none holds a prompt.
    """
    seen = set() if seen is None else seen

    def make(record: Mapping[str, Any]) -> Prompt:
        prompt = prompt_from(record)
        check(prompt)
        return prompt

    def distinct(source: Source) -> Iterator[Prompt]:
        for prompt in read_source(source, make, on_bad, skipped):
            key = prompt_key(prompt)
            if key in seen:
                skipped[REPEATED] += 1
            else:
                seen.add(key)
                yield prompt

    for source, share in zip(sources, shares_of([source.weight for source in sources], count), strict=True):
        taken = 0
        for prompt in distinct(source) if share is None else _sample(distinct(source), share, seed):
            taken += 1
            yield prompt
        if len(sources) > 1 and share is not None and taken < share:
            tqdm.write(f"prompts: {source.path} gave {taken} of the {share} that its weight asks for")
    if not seen:
        why = "; ".join(f"{count} records: {reason}" for reason, count in skipped.most_common(3))
        raise UserError(f"data.prompts={names_of(sources)} holds no prompt ({why or 'no record'}); give at least one")


def prompt_from(record: Mapping[str, Any]) -> Prompt:
    """A record as a conversation that waits for the backbone's answers.

    Given answers are dropped, and what the user says behind them follows once the backbone answered itself. A greeting
    in front stays, and so do calls of tools and all before their results, which the backbone could not get again.

    Raises:
        BadRecord: the record holds no turn of a user, or is refused by `conversation_of`.
    """
    messages, follow_ups = conversation_of(record)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRecord("no turn of a user")
    tools = [turn for turn, message in enumerate(messages) if message["role"] == "tool"]
    users = [turn for turn, message in enumerate(messages) if message["role"] == "user"]
    kept = 1 + (tools[-1] if tools else users[0])
    said = [message["content"] for message in messages[kept:] if message["role"] == "user"]
    return Prompt.of(messages[:kept], [*said, *follow_ups])


def check_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    """Refuse a prompt in which a special token is written as text.

    Raises:
        BadRecord: there is one.
    """
    said = [{"content": text} for text in prompt.follow_ups]
    try:
        check_special_tokens(tokenizer, [*prompt.messages, *said])
    except UserError as error:
        raise BadRecord(str(error)) from error


def names_of(sources: Sequence[Source]) -> str:
    """Sources in a few words."""
    return ", ".join(source.path for source in sources)


def prompt_of(record: Mapping[str, Any], source: str) -> Messages:
    """A record's conversation as it stands, without a final answer; of several turns to come the first.

    Raises:
        UserError: the record is refused; see `conversation_of`.
    """
    try:
        messages, _ = conversation_of(record)
    except BadRecord as error:
        raise UserError(f"prompts {source}: {error}") from error
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def normalized(prompt: Prompt) -> str:
    """A prompt's text up to case and spaces; equal texts are duplicates."""
    texts = [f"{message['content']}{message.get(TOOLS, '')}" for message in prompt.messages] + prompt.follow_ups
    return "\n".join(" ".join(text.lower().split()) for text in texts)


def prompt_key(prompt: Prompt) -> int:
    """A number that prompts have in common if their texts are equal up to case and spaces."""
    return _point(normalized(prompt))


def load_conversations(
    sources: Sequence[Source], on_bad: OnBad = "stop", skipped: Counter[str] | None = None
) -> Iterator[Messages]:
    """Finished conversations, one by one.

    Args:
        skipped: gets the records that are left out, by reason.

    Raises:
        UserError: a source cannot be read.
    """
    counts = Counter[str]() if skipped is None else skipped
    for source in sources:
        yield from read_source(source, _finished, on_bad, counts)


def _finished(record: Mapping[str, Any]) -> Messages:
    messages, _ = conversation_of(record)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("no turn of an assistant")
    return messages


def shares_of(weights: Sequence[float], count: int | None) -> list[int | None]:
    """How many prompts of each source; the largest remainders are rounded up, so that they add up to ``count``."""
    if count is None:
        return [None] * len(weights)
    exact = [count * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda place: shares[place] - exact[place])
    for place in by_remainder[: count - sum(shares)]:
        shares[place] += 1
    return list(shares)


def _sample(prompts: Iterator[Prompt], count: int, seed: int) -> Iterator[Prompt]:
    """Those with the lowest hashes, in the order they came in."""
    lowest: list[tuple[int, int, Prompt]] = []
    for place, prompt in enumerate(prompts):
        entry = (-_point(f"{seed}:{prompt.id}"), -place, prompt)
        if len(lowest) < count:
            heapq.heappush(lowest, entry)
        elif count and entry > lowest[0]:
            heapq.heapreplace(lowest, entry)
    for _, _, prompt in sorted(lowest, key=lambda entry: -entry[1]):
        yield prompt


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
