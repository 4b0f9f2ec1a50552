"""Chat templates: from messages to token ids, and which of those ids an assistant wrote.

Loss masks come from rendering prefixes of the conversation, not from ``{% generation %}`` marks (most templates have
none) and not from token values (a pad id may equal an end id).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from medusa_train.inference.backbone import load_tokenizer
from medusa_train.inference.errors import UserError

Message = Mapping[str, str]
Span = tuple[int, int]
_SENTINEL = "Zq7xWkV9"  # text that no template contains, to find where a user's words go


def load_chat_tokenizer(source: str, template_file: str | None = None) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer, with a chat template from a file if one is named.

    Raises:
        UserError: there is no chat template, or the file cannot be read.
    """
    tokenizer = load_tokenizer(source)
    if template_file:
        try:
            tokenizer.chat_template = Path(template_file).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"backbone.chat_template={template_file}: {error.strerror}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"backbone {source} has no chat template; write one as a Jinja file and set backbone.chat_template=FILE"
        )
    return tokenizer


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to and including the opening of the assistant's next turn."""
    return _render(tokenizer, messages, add_generation_prompt=True)


def user_turn_opening(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """What a model reads before a user's first words, and the id that ends a user's turn.

    Raises:
        UserError: the template hides the user's text, or nothing follows it.
    """
    before, found, _ = _apply(tokenizer, [{"role": "user", "content": _SENTINEL}]).partition(_SENTINEL)
    turn_end = _turn_end(tokenizer, "user") if found else None
    if not before or turn_end is None:
        raise UserError(
            "the chat template has no mark around a user's turn, so prompts cannot be synthesized; name a file"
        )
    return list(tokenizer(before, add_special_tokens=False)["input_ids"]), turn_end


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[int], list[Span]]:
    """Token ids of a finished conversation and the spans ``[start, end)`` that an assistant wrote.

    A span starts behind the template's opening of the assistant's turn and ends with the turn's end token, which is
    learnt; what the template adds behind it (a newline) is not.

    Raises:
        UserError: no assistant turn, or a template that rewrites earlier text when a turn is added.
    """
    ids: list[int] = []
    spans: list[Span] = []
    ends = {tokenizer.eos_token_id, _turn_end(tokenizer, "assistant")}
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = _opening(tokenizer, messages[:turn])
        learnt = ids[: spans[-1][1]] if spans else []
        ids = _render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if ids[: len(opened)] != opened or ids[: len(learnt)] != learnt:
            raise UserError(
                f"the chat template renders what stands before assistant turn {turn} differently once it is answered, "
                "so its tokens cannot be told apart; use a template without that"
            )
        end = next((i + 1 for i in range(len(opened), len(ids)) if ids[i] in ends), len(ids))
        if end > len(opened):
            spans.append((len(opened), end))
    if not spans:
        raise UserError("no assistant turn in the conversation: there is nothing to learn from it")
    return ids, spans


def _opening(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message]) -> list[int]:
    """Token ids up to the assistant's first word; templates render no empty conversation, so that one is cut out."""
    if before:
        return _render(tokenizer, before, add_generation_prompt=True)
    text = _apply(tokenizer, [{"role": "assistant", "content": _SENTINEL}])
    return list(tokenizer(text.partition(_SENTINEL)[0], add_special_tokens=False)["input_ids"])


def _turn_end(tokenizer: PreTrainedTokenizerBase, role: str) -> int | None:
    """The first id of what the template puts behind a message, if anything."""
    messages = [{"role": "user", "content": "?"}, {"role": role, "content": _SENTINEL}]
    closing = _apply(tokenizer, messages[-1:] if role == "user" else messages).partition(_SENTINEL)[2].strip()
    ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
    return int(ids[0]) if ids else None


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    rendered = _apply(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    # The template writes the special tokens itself; letting the tokenizer add its own would double the first one.
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options))
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template refuses the conversation: {error}") from error
