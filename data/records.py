"""What a record of a chat or prompt file says: the layouts that such files come in, told apart record by record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_train.data.chat import TOOLS

Messages = list[dict[str, Any]]

MAX_CHARACTERS = 4_000_000  # about a million tokens; longer than any context, and minutes to tokenize
# Names that speakers have in some files -> their roles.
_SPEAKERS = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "observation": "tool", "function": "tool",
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("tool_calls", "tool_call_id", "reasoning_content")
LAYOUTS = "messages, conversations, turns, prompt, instruction or question"


class BadRecord(Exception):
    """A record that nothing can be learnt from.

    Attributes:
        reason: why, in words that are the same for every record it holds for.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{detail}")
        self.reason = reason


def conversation_of(record: Mapping[str, Any]) -> tuple[Messages, list[str]]:
    """A record's conversation, with the answer that it has, and what the user says after that.

    Known are OpenAI's ``messages``; ShareGPT's ``conversations`` (``from``/``value``); ``turns``, the user's alone, as
    in MT-Bench and Spec-Bench; ``prompt`` with ``completion``, ``response`` or HumanEval's ``canonical_solution``;
    Alpaca's ``instruction``, ``input`` and ``output``; GSM8K's ``question`` and ``answer``. A ``system`` field opens
    any of them, and before it ``tools``, the functions that the assistant may call (OpenAI's declarations, or
    their JSON). Fields that are null count as missing, as files that mix layouts have them.

    Raises:
        BadRecord: another layout, or a conversation that `check_turns` refuses.
    """
    follow_ups: list[str] = []
    for field in ("messages", "conversations", "conversation"):
        if record.get(field) is not None:
            messages = [_message(message) for message in _list(record[field], field)]
            break
    else:
        if record.get("turns") is not None:
            first, *follow_ups = [_text(turn) for turn in _list(record["turns"], "turns")] or [""]
            messages = [{"role": "user", "content": first}]
        else:
            messages = _single(record)
    if isinstance(system := record.get("system"), str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    # An empty system prompt is none.
    messages = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    if tools := _tools(record):
        messages.insert(0, {"role": TOOLS, "content": "", TOOLS: tools})
    check_turns(messages)
    for text in follow_ups:
        check_turns([{"role": "user", "content": text}])
    return messages, follow_ups


def _tools(record: Mapping[str, Any]) -> list[Any]:
    if record.get(TOOLS):
        return _list(record[TOOLS], TOOLS)
    functions = record.get("functions") or []  # OpenAI's older name for the same
    return [{"type": "function", "function": each} for each in _list(functions, "functions")]


def _single(record: Mapping[str, Any]) -> Messages:
    """One question, and its answer if there is one."""
    for question, answers in (
        ("prompt", ("completion", "response", "canonical_solution")),
        ("instruction", ("output", "response")),
        ("question", ("answer",)),
    ):
        if (asked := record.get(question)) is None:
            continue
        if isinstance(asked, list):  # a prompt may be a conversation itself
            messages = [_message(message) for message in asked]
        else:
            more = record.get("input") if question == "instruction" else None
            messages = [{"role": "user", "content": "\n\n".join(_text(part) for part in (asked, more) if part)}]
        for field in answers:
            if (said := record.get(field)) is not None:
                messages += (
                    [_message(message) for message in said]
                    if isinstance(said, list)
                    else [{"role": "assistant", "content": _text(said)}]
                )
                break
        return messages
    found = ", ".join(sorted(str(name) for name in record)) or "nothing"
    raise BadRecord(f"a record needs {LAYOUTS}, found {found}")


def check_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what no template should be asked to render.

    Raises:
        BadRecord: no turn, an unknown role, tools that are no objects, an empty turn, two turns of one side in a row,
            a system prompt behind the first turn, half of a character, or a text longer than `MAX_CHARACTERS`.
    """
    if all(message["role"] == TOOLS for message in messages):
        raise BadRecord("a conversation without turns")
    before = None
    for message in messages:
        role, content = message["role"], message["content"]
        if role == TOOLS and before is None and (declared := message.get(TOOLS)):
            if not all(isinstance(each, Mapping) for each in declared):
                raise BadRecord("tools that are no objects")
            continue
        if role not in _ROLES:
            raise BadRecord(f"unknown role {role!r}")
        if not content.strip() and role != "tool" and not message.get("tool_calls"):
            raise BadRecord("an empty turn")
        if role in ("system", "developer") and before not in (None, "system", "developer"):
            raise BadRecord("a system prompt behind the first turn")
        if role == before and role in ("user", "assistant"):
            raise BadRecord(f"two turns of the {role} in a row")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRecord("the result of a tool that nobody called")
        before = role
    if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS:
        raise BadRecord(f"more than {MAX_CHARACTERS:,} characters")
    try:
        for message in messages:
            message["content"].encode()
            if message.keys() - {"role", "content"}:
                json.dumps(dict(message), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRecord("half of a character (a lone surrogate)") from error


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRecord("a message that is no object")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or not {"content", "value", "tool_calls"} & message.keys():
        found = ", ".join(sorted(str(name) for name in message))
        raise BadRecord(f"a message needs 'role' and 'content' (or 'from' and 'value'), found {found}")
    kept = {field: message[field] for field in (*_KEPT, TOOLS) if message.get(field) is not None}
    return {"role": _SPEAKERS.get(role, role), "content": "" if content is None else _text(content), **kept}


def _text(content: Any) -> str:
    """Words of a message, also where they come in parts."""
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise BadRecord("a message with parts that are not text")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRecord(f"a text that is {type(content).__name__}")
    return content


def _list(value: Any, field: str) -> list[Any]:
    if isinstance(value, str):  # a cell of a CSV file
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{field} that is no list") from error
    if not isinstance(value, list):
        raise BadRecord(f"{field} that is no list")
    return value
