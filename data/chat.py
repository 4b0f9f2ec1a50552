"""Chat templates: from messages to token ids, and which of those ids an assistant wrote.

Loss masks come from a template's ``{% generation %}`` marks where it has them, else from rendering the conversation
with and without each answer, never from searching text and never from token values (a pad id may equal an end id).

A conversation may open with a message of role `TOOLS`, which declares the functions that the assistant can call; the
template is given them apart from the turns, as transformers has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from medusa_train.data.encoding import encode_marked, encode_texts
from medusa_train.inference.backbone import load_tokenizer
from medusa_train.inference.errors import UserError

Message = Mapping[str, Any]
Span = tuple[int, int]
_SENTINEL = "Zq7xWkV9"  # text that no template contains, to find where a user's words go
TOOLS = "tools"  # role, and key of the declarations
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
    return encode_texts(tokenizer, [_apply(tokenizer, messages, add_generation_prompt=True)])[0]


def user_turn_opening(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> tuple[list[int], int]:
    """What a model reads before a user's first words, and the id that ends a user's turn.

    Args:
        system: a system prompt to open with.

    Raises:
        UserError: the template hides the user's text, nothing follows it, or it takes no system prompt.
    """
    messages = [{"role": "system", "content": system}] if system else []
    rendered = _apply(tokenizer, [*messages, {"role": "user", "content": _SENTINEL}])
    before, found, behind = rendered.partition(_SENTINEL)
    if system and system not in before:
        raise UserError("the chat template shows no system prompt, so there is no place for data.prompt_topics")
    if not before or not found or not behind.strip():
        raise UserError(
            "the chat template has no mark around a user's turn, so prompts cannot be synthesized; name a file"
        )
    opening, closing = encode_texts(tokenizer, [before, behind.strip()])
    return opening, closing[0]


def has_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template says itself what an assistant wrote (``{% generation %}``)."""
    return _MARKS.search(str(tokenizer.get_chat_template())) is not None


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[int], list[Span]]:
    """Token ids of a finished conversation and the spans ``[start, end)`` that an assistant wrote.

    A span starts behind the template's opening of the assistant's turn and ends with the turn's end token, which is
    learnt; what the template adds behind it (a newline) is not. An earlier answer that the template shows otherwise
    than it was written, such as without its thoughts, is read and not learnt. What follows the last answer is left out.

    Raises:
        UserError: no assistant turn; a message with a special token written as text; a template that refuses the
            conversation, or that renders what stands before the last answer differently once it is answered.
    """
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError("no assistant turn in the conversation: there is nothing to learn from it")
    check_special_tokens(tokenizer, messages)
    find = _marked_spans if tokenizer.is_fast and has_marks(tokenizer) else _spans_by_prefixes
    ids, spans = find(tokenizer, messages[: turns[-1] + 1], turns)
    if not spans or sum(end - start for start, end in spans) == len(ids):
        kind = "no token" if not spans else "every token"
        raise UserError(f"the chat template gives {kind} to the assistant, so there is no mask to learn by; change it")
    return ids, spans


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
    """Refuse messages in which a special token is written as text: the tokenizer would read it as the real one.

    Raises:
        UserError: there is one.
    """
    pattern = _special_tokens(tuple(tokenizer.all_special_tokens))
    for message in messages:
        for value in message.values():
            if found := pattern.search(value if isinstance(value, str) else str(value)):
                raise UserError(f"the special token {found[0]} is written as text in a message")


@lru_cache(maxsize=8)
def _special_tokens(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], _: Sequence[int]
) -> tuple[list[int], list[Span]]:
    """What the template marks, each span up to its turn's end token whether or not the marks hold that."""
    text, marked = _render_marks(tokenizer, messages)
    ids, runs = encode_marked(tokenizer, text, marked)
    ends = _end_ids(tokenizer, tokenizer.get_chat_template(), tokenizer.eos_token_id)
    spans: list[Span] = []
    for start, behind in runs:
        # Marks stop before the end token in some templates, and behind the newline that follows it in others.
        end = next((i + 1 for i in range(start, min(behind + 1, len(ids))) if ids[i] in ends), behind)
        spans.append((start, end))
    return ids, spans


def _render_marks(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """A rendered conversation, and the characters of it that the template marks.

    `apply_chat_template` tells of the marks by token only, and takes three times as long.
    """
    turns, tools = _turns(tokenizer, messages)
    given = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
    with _refusal():
        texts, marked = render_jinja_template(
            [given], tools=tools, chat_template=tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True, **tokenizer.special_tokens_map,
        )  # fmt: skip
    return texts[0], marked[0]


def _spans_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turns: Sequence[int]
) -> tuple[list[int], list[Span]]:
    """What an answer adds to the rendering of a conversation that waits for it."""
    openings = [_opening(tokenizer, messages[:turn]) for turn in turns]
    answered = [_apply(tokenizer, messages[: turn + 1]) for turn in turns]
    encoded = encode_texts(tokenizer, openings + answered)
    opened, closed = encoded[: len(turns)], encoded[len(turns) :]
    text, ids = answered[-1], closed[-1]
    ends = _end_ids(tokenizer, tokenizer.get_chat_template(), tokenizer.eos_token_id)
    spans: list[Span] = []
    for number, turn in enumerate(turns):
        start, answer = len(opened[number]), closed[number]
        end = next((i + 1 for i in range(start, len(answer)) if answer[i] in ends), None)
        if end is None:  # no turn ends with a token; space behind the words is the template's
            end = _common_prefix(answer, encode_texts(tokenizer, [answered[number].rstrip()])[0])
        same = text.startswith(openings[number]) and ids[:start] == opened[number] and ids[:end] == answer[:end]
        if not same and turn == turns[-1]:
            raise UserError(
                f"the chat template renders what stands before assistant turn {turn} differently once it is answered, "
                "so its tokens cannot be told apart; use a template without that"
            )
        if same and end > start:
            spans.append((start, end))
    return ids, spans


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _opening(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message]) -> str:
    """Text up to the assistant's first word; templates render no empty conversation, so that one is cut out."""
    if before and before[-1]["role"] != TOOLS:
        return _apply(tokenizer, before, add_generation_prompt=True)
    opening = _apply(tokenizer, [*before, {"role": "assistant", "content": _SENTINEL}]).partition(_SENTINEL)[0]
    return opening.rstrip(" ")  # a space is one token with the word behind it


@lru_cache(maxsize=8)
def _shows_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    declared = {"type": "function", "function": {"name": _SENTINEL, "description": "", "parameters": {}}}
    conversation = [{"role": "user", "content": "?"}]
    try:
        return _SENTINEL in str(tokenizer.apply_chat_template(conversation, tools=[declared], tokenize=False))
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError):
        return True  # the conversation itself will tell what the template wants


@lru_cache(maxsize=8)
def _end_ids(tokenizer: PreTrainedTokenizerBase, template: str, eos_id: int | None) -> frozenset[int]:
    """Ids that end an assistant's turn: the end token, and the special token that the template puts behind a turn.

    The last two arguments are what a tokenizer may be changed in.
    """
    ends = set() if eos_id is None else {eos_id}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
    closing = _apply(tokenizer, messages).partition(_SENTINEL)[2].strip()
    # Words that a template puts behind a turn may also stand within one, so they end nothing.
    return frozenset(ends.union(set(encode_texts(tokenizer, [closing])[0][:1]) & set(tokenizer.added_tokens_decoder)))


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    turns, tools = _turns(tokenizer, messages)
    with _refusal():
        return str(
            tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )


def _turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """The turns of a conversation, and the tools that it declares."""
    tools = None
    if messages and messages[0]["role"] == TOOLS:
        if not _shows_tools(tokenizer, str(tokenizer.get_chat_template())):
            raise UserError(
                "the chat template does not show declared tools, so the model would not know what it calls; leave out "
                "'tools', or name a template that does with backbone.chat_template"
            )
        tools, messages = messages[0][TOOLS], messages[1:]
    return [dict(message) for message in messages], tools


@contextmanager
def _refusal() -> Iterator[None]:
    try:
        yield
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the chat template refuses the conversation: {reason}") from error
