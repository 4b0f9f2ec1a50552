"""Answers from OpenAI-compatible servers (vLLM, SGLang, TGI, llama.cpp …), any number of them at once.

Token ids go in and come out where a server can do that, so that what is learnt is what the model wrote. A server that
returns only text has it tokenized again, and every such row is checked: `read_answer` says what is compared. Nothing
that a server may do wrong ends up in a row: an answer is used whole and checked (`served_answer`), or asked for again,
elsewhere if there is an elsewhere, or its prompt ends as failed with the reason. Only when no server can be reached
does the run stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from medusa_train.data.asking import Asking, Question, seed_of
from medusa_train.data.chat import TOOLS, Message, Span, encode_conversation
from medusa_train.data.distill import Backend
from medusa_train.data.journal import WAITING, Failure, Journal
from medusa_train.data.progress import AnswerProgress
from medusa_train.data.rows import Row
from medusa_train.data.served_answer import Answer, Unusable, read_answer
from medusa_train.inference.backbone import Limits
from medusa_train.inference.errors import UserError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

API_KEY = "MEDUSA_API_KEY"
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before the first and the later tries
LONGEST_RETRY_AFTER = 300.0  # a server may ask for longer than that, but not get it
FLUSH_SECONDS = 0.5  # how long an answer may lie in memory before it is on the disk
POLL_SECONDS = 0.05
PROBE_SECONDS = 10.0
FAILURES_IN_A_ROW = 100  # then something is wrong with the servers, not with the prompts
# What the servers are told besides: the plain distribution, whatever a repository's generation config recommends.
PLAIN = {"top_p": 1.0}
PLAIN_EXTRA = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}


@dataclass(frozen=True)
class Servers:
    """Where and how to ask; see `recipe.ServerSection`."""

    urls: Sequence[str]
    model: str
    api: Literal["completions", "chat"] = "completions"
    concurrency: int = 64
    timeout: float = 600.0
    retries: int = 6
    drop_mismatched: bool = True


def answer_by_servers(servers: Servers, limits: Limits) -> Backend:
    """The backend that asks servers.

    Raises:
        UserError: the client library is missing.
    """
    try:
        import openai  # noqa: F401 here, before prompts are read
    except ImportError as error:
        raise UserError("data.backend=openai needs a client; run: pip install 'medusa-train[openai]'") from error
    return partial(_answer_all, servers, limits)


def _answer_all(
    servers: Servers, limits: Limits, asking: Asking, order: NDArray[np.int64], journal: Journal,
    progress: AnswerProgress,
) -> NDArray[np.int64]:  # fmt: skip
    fleet = _Fleet(servers, limits, asking, journal, progress)
    asyncio.run(fleet.work(_waiting(asking, order, journal)))
    if fleet.faults:
        told = ", ".join(f"{reason} ({count})" for reason, count in fleet.faults.most_common(8))
        tqdm.write(f"distill: requests that went wrong: {told}")
    return _enough(journal, order, asking.answer_tokens)


def _waiting(asking: Asking, order: NDArray[np.int64], journal: Journal) -> Iterator[Question | Failure]:
    """What is still to be asked, until the answers to the first prompts, without a gap, hold the wanted tokens."""
    settled, tokens = 0, 0
    for place in order.tolist():
        if asking.answer_tokens is not None:
            while settled < len(order) and journal.status[order[settled]] != WAITING:
                tokens += int(journal.tokens[order[settled]])
                settled += 1
            if tokens >= asking.answer_tokens:
                return
        if journal.status[place] == WAITING:
            yield asking.question(asking.prompts[place])


def _enough(journal: Journal, order: NDArray[np.int64], answer_tokens: int | None) -> NDArray[np.int64]:
    """The first prompts whose answers hold the wanted tokens: the same ones in whatever order they were answered."""
    if answer_tokens is None:
        return order
    return order[: 1 + int(np.searchsorted(np.cumsum(journal.tokens[order], dtype=np.int64), answer_tokens))]


class _Refused(Exception):
    """The servers will not answer this prompt, however often it is asked."""


@dataclass
class _Server:
    """One base URL: its client, and when it was last well."""

    url: str
    client: AsyncOpenAI
    in_flight: int = 0
    faults: int = 0  # since it last answered
    rests_until: float = 0.0

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc


@dataclass
class _Fleet:
    """The servers at work; one object per run."""

    settings: Servers
    limits: Limits
    asking: Asking
    journal: Journal
    progress: AnswerProgress
    faults: Counter[str] = field(default_factory=Counter)
    _outcomes: list[Row | Failure] = field(default_factory=list)
    _failed_in_a_row: int = 0
    _jitter: random.Random = field(default_factory=random.Random)

    async def work(self, questions: Iterator[Question | Failure]) -> None:
        """Answer all questions; what is done when it ends, for whatever reason, is on the disk."""
        import openai

        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        ids, spans = encode_conversation(self.asking.tokenizer, conversation)
        self._end_id = ids[spans[0][1] - 1]
        # No key is needed by most servers, but the client wants one.
        key = os.environ.get(API_KEY) or "none"
        self._servers = [
            _Server(url, openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=self.settings.timeout))
            for url in self.settings.urls
        ]
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._check_servers()
            workers = [asyncio.create_task(self._answer_in_turn(questions)) for _ in range(self.settings.concurrency)]
            tasks = [*workers, asyncio.create_task(self._write_now_and_then(workers))]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._write()
            await asyncio.gather(*(server.client.close() for server in self._servers))

    async def _answer_in_turn(self, questions: Iterator[Question | Failure]) -> None:
        for question in questions:
            outcome = question if isinstance(question, Failure) else await self._converse(question)
            failed = isinstance(outcome, Failure)
            self._outcomes.append(outcome)
            if isinstance(question, Failure):
                self.progress.skip()
                await asyncio.sleep(0)
                continue
            self.progress.advance(outcome.learnt_tokens if isinstance(outcome, Row) else 0, failed=failed)
            self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
            if isinstance(outcome, Failure) and self._failed_in_a_row >= FAILURES_IN_A_ROW:
                raise UserError(
                    f"{FAILURES_IN_A_ROW} prompts in a row failed, the last one for: {outcome.failed}; see to the "
                    "servers, then the same command with --retry-failed goes on"
                )

    async def _write_now_and_then(self, workers: Sequence[asyncio.Task[None]]) -> None:
        while not all(worker.done() for worker in workers):
            await asyncio.wait(workers, timeout=FLUSH_SECONDS)
            self._write()

    def _write(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        self.journal.append(outcomes)

    async def _converse(self, question: Question) -> Row | Failure:
        """Ask turn by turn; the row is what was said until the conversation ended."""
        messages: list[Message] = list(question.prompt.messages)
        if messages[0]["role"] == TOOLS and self.settings.api == "chat":
            why = "tools are declared, and over data.server.api=chat servers take calls apart; use completions"
            return Failure(question.prompt.id, why, skipped=True)
        ids, mismatch = question.ids, None
        spans: list[Span] = []
        tokenizer, turn = self.asking.tokenizer, 0
        while True:
            try:
                answer = await self._ask(question, ids, messages, seed_of(self.asking.seed, question.prompt.id, turn))
            except _Refused as refusal:
                return Failure(question.prompt.id, str(refusal))
            mismatch = mismatch or answer.mismatch
            if mismatch and self.settings.drop_mismatched:
                return Failure(question.prompt.id, mismatch)
            if spans and answer.prompt_ids != ids:  # the earlier answers would stand elsewhere
                return Failure(question.prompt.id, "the server read other prompt tokens than were sent")
            spans.append((len(answer.prompt_ids), len(answer.prompt_ids) + len(answer.ids)))
            ids = answer.prompt_ids + answer.ids
            longer = self.asking.next_turn(question, ids, spans) if answer.finish_reason == "stop" else None
            if longer is None:
                return question.row(ids, spans, answer.finish_reason, mismatch)
            said = tokenizer.decode(answer.ids[:-1], skip_special_tokens=False)
            follow_up = question.prompt.follow_ups[turn]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": follow_up}]
            ids, turn = longer, turn + 1

    async def _ask(self, question: Question, ids: list[int], messages: Sequence[Message], seed: int) -> Answer:
        """One turn, asked until there is a usable answer.

        Raises:
            _Refused: there is none, with the last reason.
            UserError: no server can be reached, or none lets us in.
        """
        import openai

        reason, unreachable = "", False
        missed: set[str] = set()  # servers that did not answer this question
        for tries in range(self.settings.retries + 1):
            if tries:
                await asyncio.sleep(self._pause(tries))
            server = await self._free_server(missed)
            server.in_flight += 1
            try:
                async with asyncio.timeout(self.settings.timeout):
                    text = await self._send(server, question, ids, messages, seed)
                answer = read_answer(
                    json.loads(text), self.settings.model, ids, self.asking.tokenizer, self.limits, self._end_id
                )
            except (TimeoutError, openai.APITimeoutError):
                reason, unreachable = f"no answer within {self.settings.timeout:g} seconds", True
            except openai.APIConnectionError:
                reason, unreachable = "the connection failed", True
            except openai.APIStatusError as error:
                reason, unreachable = self._judge_status(server, error), False
                server.rests_until = max(server.rests_until, time.monotonic() + _retry_after(error))
            except Unusable as fault:
                reason, unreachable = str(fault), False
            except ValueError:
                reason, unreachable = "the answer is no whole JSON", False
            else:
                server.faults = 0
                return answer
            finally:
                server.in_flight -= 1
            self.faults[reason] += 1
            self.progress.retries += tries < self.settings.retries
            if unreachable:
                missed.add(server.url)
                server.faults += 1
                server.rests_until = max(server.rests_until, time.monotonic() + self._pause(server.faults))
        if unreachable and not any(await asyncio.gather(*map(self._models, self._servers))):
            names = ", ".join(server.name for server in self._servers)
            raise UserError(
                f"no server can be reached any more ({names}: {reason}); the same command goes on from here"
            )
        raise _Refused(reason)

    async def _send(
        self, server: _Server, question: Question, ids: list[int], messages: Sequence[Message], seed: int
    ) -> str:
        common: dict[str, Any] = {
            "model": self.settings.model,
            "max_tokens": self.asking.max_new_tokens,
            "temperature": question.temperature,
            "seed": seed,
            "extra_body": PLAIN_EXTRA,
            **PLAIN,
        }
        if self.settings.api == "chat":
            chat: Any = server.client.chat.completions.with_raw_response
            response = await chat.create(messages=messages, **common)
        else:
            response = await server.client.completions.with_raw_response.create(prompt=ids, **common)
        return str(response.http_response.text)

    def _pause(self, tries: int) -> float:
        return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (tries - 1)) * self._jitter.uniform(0.5, 1.0)

    async def _free_server(self, missed: Collection[str]) -> _Server:
        """The least busy server that is well; one that was not reached last time gets a single request to show it.

        No question is spent on a dead server twice while another is well: it goes to one that it has not ``missed``.
        """
        while True:
            now = time.monotonic()
            well = [
                server
                for server in self._servers
                if server.rests_until <= now and not (server.faults and server.in_flight)
            ]
            if well:
                return min(well, key=lambda server: (server.url in missed, server.in_flight))
            await asyncio.sleep(POLL_SECONDS)

    def _judge_status(self, server: _Server, error: Any) -> str:
        """Why a request was turned down, if it may be tried again."""
        status = int(error.status_code)
        _check_key(server, error)
        if status == 404:
            raise UserError(
                f"{server.name} has no {self.settings.api} API at this URL, or no model {self.settings.model} "
                "(HTTP 404); correct data.server.urls, data.server.model or data.server.api"
            ) from error
        if status in (408, 409, 425, 429) or status >= 500:
            return f"HTTP {status}"
        self.faults[f"HTTP {status}"] += 1
        said = (
            str(error.message).removeprefix(f"Error code: {status} - ").replace(os.environ.get(API_KEY) or "\0", "***")
        )
        message = " ".join(said.split())[:160]
        raise _Refused(f"HTTP {status}: {message}") from error

    async def _check_servers(self) -> None:
        """Before any work: somebody is there, and nobody serves something else."""
        found = await asyncio.gather(*map(self._models, self._servers))
        names = ", ".join(server.name for server in self._servers)
        if not any(found):
            raise UserError(f"no server can be reached at {names}; start one, or correct data.server.urls")
        for server, models in zip(self._servers, found, strict=True):
            if not models:
                tqdm.write(f"distill: {server.name} cannot be reached now; it is tried again later")
                server.faults = 1
            elif isinstance(models, list) and self.settings.model not in models:
                raise UserError(
                    f"{server.name} serves {', '.join(models[:5])} and not {self.settings.model}; "
                    "set data.server.model to the server's name for it"
                )

    async def _models(self, server: _Server) -> list[str] | bool:
        """The names of a server's models; True if it is there and tells none, False if it is not there."""
        import openai

        try:
            async with asyncio.timeout(PROBE_SECONDS):
                response = await server.client.with_options(timeout=PROBE_SECONDS).models.with_raw_response.list()
                return [str(model["id"]) for model in json.loads(response.http_response.text)["data"]] or True
        except openai.APIStatusError as error:
            _check_key(server, error)
            return True
        except (TimeoutError, openai.APIConnectionError):
            return False
        except (ValueError, KeyError, TypeError):
            return True


def _check_key(server: _Server, error: Any) -> None:
    # The server's own words may hold the key.
    if error.status_code in (401, 403):
        raise UserError(f"{server.name} refuses the key (HTTP {error.status_code}); set {API_KEY}") from None


def _retry_after(error: Any) -> float:
    """Seconds that a server asks to be left alone for; 0 if it does not say so in seconds."""
    try:
        seconds = float(error.response.headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return min(LONGEST_RETRY_AFTER, max(0.0, seconds))
