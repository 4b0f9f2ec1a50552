"""An OpenAI-compatible server as an arm: what a user might run instead, timed from outside.

The server gets messages, not tokens, and its own count of what it wrote (``usage``) is taken. vLLM also counts its
speculative decoding under ``/metrics``; read before and after an answer, these give its acceptance beside ours. They
are the server's totals: anybody else who uses it meanwhile is counted too.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPResponse
from time import perf_counter
from typing import Any

from medusa_train.data.chat import TOOLS
from medusa_train.eval.answers import Turn
from medusa_train.eval.questions import Question
from medusa_train.inference.errors import UserError

TIMEOUT = 600  # seconds
COUNTERS = {  # ours: vLLM's
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class Server:
    """An address such as ``http://localhost:8000`` and the name of the model there.

    The environment variable ``OPENAI_API_KEY`` is sent along where it is set, and kept nowhere.
    """

    url: str
    model: str
    key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""), repr=False)

    def ask(self, questions: Sequence[Question], max_new_tokens: int) -> list[list[Turn]]:
        """Lead conversations, one after the other; see `answers.Ask`.

        Raises:
            UserError: no answer, or one without a count of its tokens.
        """
        return [self._lead(question, max_new_tokens) for question in questions]

    def _lead(self, question: Question, max_new_tokens: int) -> list[Turn]:
        messages, turns = list(question.messages), []
        if messages[0]["role"] == TOOLS:
            raise UserError("a server takes calls of tools apart, so questions that declare some cannot be compared")
        for follow_up in (*question.follow_ups, None):
            turns.append(self._answer(messages, max_new_tokens))
            if follow_up is not None:
                messages += [{"role": "assistant", "content": turns[-1].text}, {"role": "user", "content": follow_up}]
        return turns

    def _answer(self, messages: list[dict[str, str]], max_new_tokens: int) -> Turn:
        before = self._counters()
        start, first, pieces, tokens = perf_counter(), None, list[str](), 0
        for event in self._events(messages, max_new_tokens):
            for choice in event.get("choices") or ():
                if piece := choice.get("delta", {}).get("content"):
                    first = first or perf_counter()
                    pieces.append(piece)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        end = perf_counter()
        if not tokens:
            raise UserError(f"server {self.url} wrote nothing, or does not count its tokens (stream_options)")
        after = self._counters()
        drafting = {name: after[name] - before[name] for name in COUNTERS if name in before and name in after}
        first = first or end
        return Turn(tokens, 1, first - start, end - first, "".join(pieces), drafting=drafting)

    def _events(self, messages: list[dict[str, str]], max_new_tokens: int) -> Iterator[dict[str, Any]]:
        body = {
            "model": self.model, "messages": messages, "max_tokens": max_new_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                text = line.decode().strip().removeprefix("data:").strip()
                if text and text != "[DONE]":
                    try:
                        yield json.loads(text)
                    except ValueError:
                        raise UserError(f"server {self.url} sent no JSON: {text[:80]}") from None

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None if body is None else json.dumps(body).encode()
        address = self.url.rstrip("/").removesuffix("/v1") + path
        if not address.startswith(("http://", "https://")):
            raise UserError(f"server {self.url}: an address starts with http:// or https://")
        try:
            request = urllib.request.Request(address, content, headers)
            response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            raise UserError(
                f"server {address} answers {error.code}: {error.read(200).decode(errors='replace')}"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"server {address} cannot be reached: {error}") from None
        return response

    def _counters(self) -> dict[str, float]:
        """The server's totals; empty where it publishes none."""
        totals: dict[str, float] = {}
        try:
            with self._open("/metrics") as response:
                lines = response.read().decode(errors="replace").splitlines()
        except UserError:
            return totals
        for line in lines:
            for name, theirs in COUNTERS.items():
                if line.startswith((theirs + "{", theirs + " ")):
                    totals[name] = totals.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return totals
