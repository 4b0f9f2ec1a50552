"""What a server answered: checked, and as token ids.

Ids are the server's own where it returns them. Otherwise its text is tokenized again, and the answer is marked where
that cannot be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_train.inference.backbone import Limits

BOUNDARY_TOKENS = 8  # of the prompt's end, in front of a text that is tokenized again


@dataclass(frozen=True)
class Answer:
    """One turn of the model's.

    Attributes:
        prompt_ids: what it read, as far as the server tells, else what it was meant to read.
        ids: what it wrote, with its end token.
        finish_reason: ``stop`` or ``length``.
        mismatch: why these may not be the very ids; None if they are.
    """

    prompt_ids: list[int]
    ids: list[int]
    finish_reason: str
    mismatch: str | None


class Unusable(Exception):
    """An answer that nothing can be learnt from; another try may give a better one."""


def read_answer(
    payload: Any, model: str, prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, limits: Limits, end_id: int
) -> Answer:
    """Check a server's answer and take its token ids.

    A text that had to be tokenized again is marked where it does not come back from its ids, or holds broken
    characters; where it does not begin at a token of its own behind the prompt; where the server counted other tokens
    than that gives. Any answer is marked where the server read another prompt than it was sent.

    Args:
        payload: the JSON of its response, of either API.
        model: which one was asked.
        prompt_ids: what it was asked.
        end_id: what ends an assistant's turn in the chat template; servers leave it out of the text.

    Raises:
        Unusable: another model answered, or there is no whole answer.
    """
    if not isinstance(payload, Mapping):
        raise Unusable("the answer is no JSON object")
    if payload.get("model") != model:
        raise Unusable(f"answered by model {payload.get('model')!r}")
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise Unusable("the answer holds no choice")
    choice = choices[0]
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    reason, ids = choice.get("finish_reason"), choice.get("token_ids")
    if reason not in ("stop", "length") or (not isinstance(text, str) and not ids):
        raise Unusable(f"no answer to learn from (finish reason {reason})")
    read = choice.get("prompt_token_ids") or payload.get("prompt_token_ids") or list(prompt_ids)
    if not _are_ids(read, limits) or (ids is not None and not _are_ids(ids, limits)):
        raise Unusable("token ids outside the backbone's vocabulary")
    usage = payload.get("usage")
    counted = usage if isinstance(usage, Mapping) else {}
    mismatch = None
    if read != list(prompt_ids) or (counted.get("prompt_tokens") or len(read)) != len(read):
        mismatch = "the server read other prompt tokens than were sent"
    if ids:
        ends = {*limits.eos_token_ids, end_id}
        ids = ids if reason == "length" or ids[-1] in ends else [*ids, end_id]
        return Answer(read, ids, reason, mismatch)
    ids, doubt = _encode_again(str(text), read, tokenizer)
    ids = [*ids, end_id] if reason == "stop" else ids
    if not ids:
        raise Unusable("the answer is empty")
    # An end token is counted by some servers and not by others.
    if (counted.get("completion_tokens") or len(ids)) not in (len(ids), len(ids) - (reason == "stop")):
        doubt = doubt or "the server counted other answer tokens than its text gives"
    return Answer(read, ids, reason, mismatch or doubt)


def _are_ids(ids: Any, limits: Limits) -> bool:
    return isinstance(ids, list) and all(type(token) is int and 0 <= token < limits.vocab_size for token in ids)


def _encode_again(
    text: str, prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], str | None]:
    """Token ids of an answer behind its prompt, and what speaks against them."""

    def encode(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])

    # With the prompt's last tokens in front: some tokenizers put a space before the first word of a text.
    before = tokenizer.decode(list(prompt_ids[-BOUNDARY_TOKENS:]), skip_special_tokens=False)
    head, joint = encode(before), encode(before + text)
    if joint[: len(head)] != head:
        return encode(text), "prompt and answer share a token when tokenized again"
    if "\ufffd" in text or tokenizer.decode(joint, skip_special_tokens=False) != before + text:
        return joint[len(head) :], "the answer does not come back from its tokens"
    return joint[len(head) :], None
