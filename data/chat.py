"""Chat templates: from messages to token ids, and which of those ids an assistant wrote.

Loss masks come from rendering prefixes of the conversation, not from ``{% generation %}`` marks (most templates have
none) and not from token values (a pad id may equal an end id).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
    text = tokenizer.apply_chat_template([{"role": "user", "content": _SENTINEL}], tokenize=False)
    before, found, after = text.partition(_SENTINEL)
    closing = tokenizer(after.strip(), add_special_tokens=False)["input_ids"] if found else []
    if not before or not closing:
        raise UserError(
            "the chat template has no mark around a user's turn, so prompts cannot be synthesized; name a file"
        )
    return list(tokenizer(before, add_special_tokens=False)["input_ids"]), int(closing[0])


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
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = _render(tokenizer, messages[:turn], add_generation_prompt=True)
        ids = _render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if ids[: len(opened)] != opened:
            raise UserError(
                f"the chat template renders the opening of assistant turn {turn} differently once it is answered, "
                "so its tokens cannot be told apart; use a template without that"
            )
        end = len(ids)
        if tokenizer.eos_token_id in ids[len(opened) :]:
            end = ids.index(tokenizer.eos_token_id, len(opened)) + 1
        if end > len(opened):
            spans.append((len(opened), end))
    if not spans:
        raise UserError("no assistant turn in the conversation: there is nothing to learn from it")
    return ids, spans


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, tokenize=False
    )
    # The template writes the special tokens itself; letting the tokenizer add its own would double the first one.
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
