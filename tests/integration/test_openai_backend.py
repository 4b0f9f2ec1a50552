"""Distillation by servers: the real client against a real HTTP server that answers, delays, fails, lies and dies."""

import contextlib
import errno
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import yaml

from conftest import assert_refused
from medusa_train.data import journal as journal_module
from medusa_train.data import openai_backend
from medusa_train.data.asking import Asking, seed_of
from medusa_train.data.chat import load_chat_tokenizer, render_prompt
from medusa_train.data.distill import distill, failures
from medusa_train.data.journal import Failure
from medusa_train.data.openai_backend import Servers, answer_by_servers
from medusa_train.data.rows import JsonLines, Prompt, append_jsonl, read_rows
from medusa_train.data.served_answer import Unusable, read_answer
from medusa_train.inference import UserError
from medusa_train.inference.backbone import read_limits
from medusa_train.job import Job
from medusa_train.recipe import load_recipe
from medusa_train.stages import run_stages

SYSTEM = [{"role": "system", "content": "the cat sat"}]
PROMPTS = [
    Prompt.of([*SYSTEM[: i % 2], {"role": "user", "content": f"what is {'the ' * (i % 5)}{i} ?"}]) for i in range(24)
]
SHARES = {"calibration_share": 0.3, "heldout_share": 0.3}
MAX_NEW_TOKENS = 5
WORDS = ["what", "is", "the", "cat", "on", "mat", "and", "this", "sat"]
KEY = "very-secret-key-1234"


class Model:
    """What the servers serve: words that follow from the prompt's ids, sometimes cut by length."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def answer(self, prompt):
        """Token ids, and why they end."""
        number = int(hashlib.sha256(str(list(prompt)).encode()).hexdigest()[:8], 16)
        text = " ".join(WORDS[(number >> i) % len(WORDS)] for i in range(1 + number % 4))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.end]
        return (ids, "stop") if len(ids) <= MAX_NEW_TOKENS else (ids[:MAX_NEW_TOKENS], "length")


class Server:
    """An OpenAI-compatible server on a port of this machine.

    ``fault`` is asked before every answer, with the request and how often this prompt was asked here before: None for
    a good answer, or one of the ways of `_Handler.go_wrong`. ``shape`` may change a good answer.
    """

    def __init__(self, model, fault=lambda request, before: None, shape=lambda payload: payload, port=0, name="tiny"):
        self.model, self.fault, self.shape, self.name = model, fault, shape, name
        self.requests, self.keys, self.asked = [], set(), {}
        self.lock, self.sockets = threading.Lock(), []
        handler = type("Handler", (_Handler,), {"owner": self})
        self.http = _Http(("127.0.0.1", port), handler)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self):
        """Vanish as a crashed process does, connections and all."""
        self.http.shutdown()
        self.http.server_close()
        with self.lock:
            for connection in self.sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass  # connections are meant to break here


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner = None

    def setup(self):
        super().setup()
        with self.owner.lock:
            self.owner.sockets.append(self.connection)

    def log_message(self, *_):
        pass

    def send(self, content, status=200, headers=(), length=None):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.send(json.dumps({"object": "list", "data": [{"id": self.owner.name, "object": "model"}]}).encode())

    def do_POST(self):
        owner = self.owner
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with owner.lock:
            key = json.dumps(request.get("prompt") or request["messages"])
            before = owner.asked[key] = owner.asked.get(key, -1) + 1
            owner.requests.append(request)
            owner.keys.add(self.headers["Authorization"])
        chat = "messages" in request
        prompt = render_prompt(owner.model.tokenizer, request["messages"]) if chat else request["prompt"]
        ids, reason = owner.model.answer(prompt)
        text = owner.model.tokenizer.decode([token for token in ids if token != owner.model.end])
        choice = {"index": 0, "finish_reason": reason, "token_ids": ids}
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        payload = {
            "id": "x", "object": "completion", "created": 0, "model": request["model"],
            "choices": [choice | said | ({} if chat else {"prompt_token_ids": prompt})],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        } | ({"prompt_token_ids": prompt} if chat else {})  # fmt: skip
        fault = owner.fault(request, before)
        if fault is None:
            self.send(json.dumps(owner.shape(payload)).encode())
        else:
            self.go_wrong(fault, payload)

    def go_wrong(self, fault, payload):
        content = json.dumps(payload).encode()
        match fault:
            case int():
                headers = [("Retry-After", "0.05")] if fault == 429 else []
                self.send(
                    json.dumps({"error": {"message": f"no, {self.headers['Authorization']}"}}).encode(), fault, headers
                )
            case "truncated":
                self.send(content[: len(content) // 2])
            case "half":  # fewer bytes than promised
                self.send(content[: len(content) // 2], length=len(content))
                self.connection.shutdown(socket.SHUT_RDWR)
            case "dropped":
                self.connection.shutdown(socket.SHUT_RDWR)
            case "hanging":
                time.sleep(2)
            case "page":
                self.send(b"<html>Gateway</html>")
            case "other model":
                self.send(json.dumps(payload | {"model": "another"}).encode())
            case "no choice":
                self.send(json.dumps(payload | {"choices": []}).encode())
            case "aborted":
                payload["choices"][0]["finish_reason"] = "abort"
                self.send(json.dumps(payload).encode())
            case "foreign ids":
                payload["choices"][0]["token_ids"] = [10**6]
                self.send(json.dumps(payload).encode())


FAULTS = {
    500: "HTTP 500",
    429: "HTTP 429",
    "truncated": "the answer is no whole JSON",
    "half": "the connection failed",
    "dropped": "the connection failed",
    "hanging": "no answer within 1 seconds",
    "page": "the answer is no whole JSON",
    "other model": "answered by model 'another'",
    "no choice": "the answer holds no choice",
    "aborted": "no answer to learn from (finish reason abort)",
    "foreign ids": "token ids outside the backbone's vocabulary",
}


@pytest.fixture(autouse=True)
def _patience_is_short(monkeypatch):
    monkeypatch.setattr(openai_backend, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(openai_backend, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(openai_backend, "POLL_SECONDS", 0.005)
    monkeypatch.delenv(openai_backend.API_KEY, raising=False)


@pytest.fixture(scope="module")
def tokenizer(tiny_chat_folder):
    return load_chat_tokenizer(str(tiny_chat_folder))


@pytest.fixture(scope="module")
def limits(tiny_chat_folder):
    return read_limits(str(tiny_chat_folder))


@pytest.fixture
def serve(tokenizer):
    started = []

    def start(**options):
        started.append(Server(Model(tokenizer), **options))
        return started[-1]

    yield start
    for server in started:
        with contextlib.suppress(OSError):
            server.die()


@pytest.fixture
def ask(tokenizer, limits):
    """Distil into a folder from servers; the rows."""

    def run(folder, *servers, prompts=PROMPTS, answer_tokens=None, retry_failed=False, temperatures=(0.0,), **options):
        asking = Asking(
            tokenizer, prompts, MAX_NEW_TOKENS, limits.max_positions, answer_tokens, **SHARES, seed=3,
            temperatures=temperatures,
        )  # fmt: skip
        settings = {"concurrency": 4, "timeout": 60, "retries": 3} | options
        fleet = Servers([server.url for server in servers], "tiny", **settings)
        distill(asking, folder, answer_by_servers(fleet, limits), retry_failed)
        return read_rows(folder / "rows.jsonl")

    return run


def failed_rows(folder):
    return {failure.id: failure.failed for failure in JsonLines(folder / "failed.jsonl", lambda r: Failure(**r))}


def expected_text(tokenizer, prompt):
    ids = render_prompt(tokenizer, prompt.messages)
    answer, reason = Model(tokenizer).answer(ids)
    return ids + answer, [(len(ids), len(ids) + len(answer))], reason


# What is learnt


def test_rows_are_the_servers_tokens_in_the_order_of_the_prompts_however_they_came(serve, ask, tokenizer, tmp_path):
    contents = []
    for run in range(3):
        chance = random.Random(run)
        server = serve(fault=lambda *_, chance=chance: time.sleep(chance.random() * 0.05))
        rows = ask(tmp_path / str(run), server, concurrency=8)
        contents.append((tmp_path / str(run) / "rows.jsonl").read_bytes())
        assert sorted(request["prompt"] for request in server.requests) == sorted(
            render_prompt(tokenizer, prompt.messages) for prompt in PROMPTS
        )
    assert contents[0] == contents[1] == contents[2]
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    by_id = {prompt.id: prompt for prompt in PROMPTS}
    assert sorted(row.id for row in rows) == sorted(by_id)
    for row in rows:
        assert (row.input_ids, row.spans, row.finish_reason) == expected_text(tokenizer, by_id[row.id])
        assert (row.mismatch, row.messages) == (None, by_id[row.id].messages)
    assert [row.split == "train" for row in rows] == sorted(row.split == "train" for row in rows)


def test_every_prompt_has_its_own_seed_and_temperature_and_no_other_settings(serve, ask, tokenizer, tmp_path):
    server = serve()
    rows = ask(tmp_path, server, temperatures=[0.0, 0.7])
    by_ids = {str(request["prompt"]): request for request in server.requests}
    assert {row.temperature for row in rows} == {0.0, 0.7}
    for row in rows:
        request = by_ids[str(row.input_ids[: row.spans[0][0]])]
        assert request["temperature"] == row.temperature
        assert request["seed"] == seed_of(3, row.id)
        plain = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        assert request | plain == request
        assert (request["max_tokens"], request["model"]) == (MAX_NEW_TOKENS, "tiny")
    assert len({request["seed"] for request in server.requests}) == len(PROMPTS)


def test_a_token_budget_takes_the_first_prompts_however_they_came(serve, ask, tmp_path):
    prompts, budget = [Prompt.of([{"role": "user", "content": f"is {i} ?"}]) for i in range(60)], 170
    every = ask(tmp_path / "every", serve(), prompts=prompts)
    for run in range(2):
        chance = random.Random(run)
        server = serve(fault=lambda *_, chance=chance: time.sleep(chance.random() * 0.03))
        rows = ask(tmp_path / str(run), server, prompts=prompts, answer_tokens=budget, concurrency=3)
        assert rows == every[: len(rows)]
        assert sum(row.learnt_tokens for row in rows[:-1]) < budget <= sum(row.learnt_tokens for row in rows)
        assert len(server.requests) < len(prompts)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_next_turn_is_asked_behind_the_models_own_answer(serve, ask, tokenizer, tmp_path, api):
    prompts = [Prompt.of(prompt.messages, ["and this ?", "and the mat ?"]) for prompt in PROMPTS]
    server = serve()
    rows = ask(tmp_path, server, prompts=prompts, api=api)
    by_id = {prompt.id: prompt for prompt in prompts}
    assert {len(row.spans) for row in rows} == {1, 2, 3}
    for row in rows:
        messages = list(by_id[row.id].messages)
        for turn, (start, end) in enumerate(row.spans):
            prompt = render_prompt(tokenizer, messages)
            answer, reason = Model(tokenizer).answer(prompt)
            assert row.input_ids[:start] == prompt
            assert row.input_ids[start:end] == answer
            if reason == "length":  # a cut answer is nothing to go on from
                assert end == len(row.input_ids)
                assert row.finish_reason == "length"
                break
            said = tokenizer.decode(answer[:-1])
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": text} for text in by_id[row.id].follow_ups[turn : turn + 1]]
        else:
            assert len(row.spans) == 3


def without_ids(payload):
    for part in (payload, payload["choices"][0]):
        part.pop("token_ids", None)
        part.pop("prompt_token_ids", None)
    return payload


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_text_without_ids_is_tokenized_again_to_the_same_rows(serve, ask, tmp_path, api):
    served = ask(tmp_path / "ids", serve())
    again = ask(tmp_path / "text", serve(shape=without_ids), api=api)
    assert [row.id for row in again] == [row.id for row in served]
    assert [row.input_ids for row in again] == [row.input_ids for row in served]
    assert [row.spans for row in again] == [row.spans for row in served]
    assert {row.mismatch for row in again} == {None}


def test_labels_follow_the_servers_ids_where_its_text_would_be_tokenized_otherwise(serve, ask, tokenizer, tmp_path):
    def letter_by_letter(payload):
        choice = payload["choices"][0]
        letters = [token for letter in choice["text"] for token in tokenizer(letter)["input_ids"]]
        choice["token_ids"] = letters + choice["token_ids"][-1:]
        payload["usage"]["completion_tokens"] = len(choice["token_ids"])
        return payload

    canonical = {row.id: row for row in ask(tmp_path / "canonical", serve())}
    rows = ask(tmp_path / "letters", serve(shape=letter_by_letter))
    for row in rows:
        ((start, end),) = row.spans
        assert end - start > canonical[row.id].learnt_tokens
        assert all(len(tokenizer.decode([token])) == 1 for token in row.input_ids[start : end - 1])
        assert row.mismatch is None


@pytest.mark.parametrize("drop", [True, False])
def test_rows_that_cannot_be_trusted_are_marked_or_dropped(serve, ask, tmp_path, drop):
    def miscounted(payload):
        if payload["choices"][0]["text"].startswith("the"):
            payload["usage"]["completion_tokens"] += 2
        return without_ids(payload)

    rows = ask(tmp_path, serve(shape=miscounted), drop_mismatched=drop)
    marked = [row for row in rows if row.mismatch]
    reason = "the server counted other answer tokens than its text gives"
    if drop:
        assert not marked
        assert set(failed_rows(tmp_path).values()) == {reason}
        assert len(rows) + len(failed_rows(tmp_path)) == len(PROMPTS)
    else:
        assert {row.mismatch for row in marked} == {reason}
        assert len(rows) == len(PROMPTS) > len(marked) > 0


class TestReadAnswer:
    """One answer, checked."""

    PROMPT = "<|im_start|>user\nwhat ?<|im_end|>\n<|im_start|>assistant\n"

    @pytest.fixture
    def read(self, tokenizer, limits):
        prompt = tokenizer(self.PROMPT, add_special_tokens=False)["input_ids"]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")

        def run(usage=None, **choice):
            payload = {"model": "tiny", "choices": [{"finish_reason": "stop"} | choice], "usage": usage}
            answer = read_answer(payload, "tiny", prompt, tokenizer, limits, end)
            assert answer.prompt_ids == choice.get("prompt_token_ids", prompt)
            return answer

        return run

    def test_text_ends_with_the_turns_end_unless_it_was_cut(self, read, tokenizer):
        ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert read(text="the cat").ids == [*ids, end]
        assert read(text="the cat", finish_reason="length").ids == ids
        assert read(token_ids=[*ids, end]).ids == [*ids, end]
        assert read(token_ids=ids).ids == [*ids, end]  # some servers leave the end out
        assert read(token_ids=ids, finish_reason="length").ids == ids
        assert read(text="").ids == [end]

    @pytest.mark.parametrize(
        ("usage", "choice", "mismatch"),
        [
            ({"completion_tokens": 9}, {"text": "the cat"}, "the server counted other answer tokens"),
            ({"prompt_tokens": 3}, {"text": "the cat"}, "the server read other prompt tokens"),
            ({"prompt_tokens": 3}, {"token_ids": [5, 1]}, "the server read other prompt tokens"),
            (None, {"token_ids": [5, 1], "prompt_token_ids": [0, 7]}, "the server read other prompt tokens"),
            (None, {"text": "the \ufffd"}, "does not come back from its tokens"),
        ],
    )
    def test_what_cannot_be_trusted_is_marked(self, read, usage, choice, mismatch):
        assert mismatch in read(usage, **choice).mismatch

    def test_a_text_that_grows_into_the_prompt_is_marked(self, read, tokenizer):
        class Merging:
            """A tokenizer in which a newline merges with the next one."""

            def __call__(self, text, **_):
                pieces = re.findall(r"\n\n|.|\n", text)
                return {"input_ids": [500 if piece == "\n\n" else ord(piece) for piece in pieces]}

            def decode(self, ids, **_):
                return "".join("\n\n" if i == 500 else chr(i) for i in ids)

        prompt = [ord(character) for character in "user\n"]
        limits = type("Limits", (), {"vocab_size": 512, "eos_token_ids": (1,)})

        def mismatch(text):
            payload = {"model": "m", "choices": [{"text": text, "finish_reason": "stop"}]}
            return read_answer(payload, "m", prompt, Merging(), limits, 1).mismatch

        assert mismatch("cat") is None
        assert mismatch("\n\ncat") == "prompt and answer share a token when tokenized again"

    def test_a_text_that_does_not_come_back_is_marked(self):
        class Forgetting:
            """A tokenizer that knows no capitals."""

            def __call__(self, text, **_):
                return {"input_ids": [ord(character) for character in text.lower()]}

            def decode(self, ids, **_):
                return "".join(map(chr, ids))

        limits = type("Limits", (), {"vocab_size": 512, "eos_token_ids": (1,)})
        payload = {"model": "m", "choices": [{"text": "The cat", "finish_reason": "stop"}]}
        answer = read_answer(payload, "m", [ord("u")], Forgetting(), limits, 1)
        assert answer.mismatch == "the answer does not come back from its tokens"

    @pytest.mark.parametrize(
        "payload",
        [
            None, [], {"model": "tiny"}, {"model": "tiny", "choices": [None]}, {"model": "tiny", "choices": "x"},
            {"choices": [{"text": "a", "finish_reason": "stop"}]},
            {"model": "tiny", "choices": [{"finish_reason": "stop"}]},
            {"model": "tiny", "choices": [{"finish_reason": "stop", "message": "a"}]},
            {"model": "tiny", "choices": [{"finish_reason": "tool_calls", "message": {"content": None}}]},
            {"model": "tiny", "choices": [{"finish_reason": "stop", "token_ids": ["1"]}]},
            {"model": "tiny", "choices": [{"finish_reason": "length", "text": ""}]},
        ],
    )  # fmt: skip
    def test_anything_else_is_unusable(self, payload, tokenizer, limits):
        with pytest.raises(Unusable):
            read_answer(payload, "tiny", [5, 6], tokenizer, limits, 1)


# What goes wrong


def hurry(fault):
    """Only what hangs is waited for no longer than a second: this machine may be busy."""
    return {"timeout": 1} if fault == "hanging" else {}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_goes_wrong_once_is_asked_again_and_counted(serve, ask, tmp_path, capsys, fault):
    whole = ask(tmp_path / "whole", serve())
    victims = {request["seed"] for request in [{"seed": seed_of(3, prompt.id)} for prompt in PROMPTS[:3]]}
    server = serve(fault=lambda request, before: fault if request["seed"] in victims and not before else None)
    capsys.readouterr()
    assert ask(tmp_path / "rows", server, **hurry(fault)) == whole
    told = capsys.readouterr().out
    assert f"{FAULTS[fault]} (" in told, told
    assert "tried again" in told
    assert not (tmp_path / "rows" / "failed.jsonl").exists()


@pytest.mark.parametrize("fault", [500, "truncated", "other model", "hanging", "dropped", 400], ids=str)
def test_what_always_goes_wrong_ends_as_failed_and_can_be_asked_again_alone(serve, ask, tmp_path, capsys, fault):
    victims = {seed_of(3, prompt.id) for prompt in PROMPTS[:2]}
    server = serve(fault=lambda request, before: fault if request["seed"] in victims else None)
    rows = ask(tmp_path / "rows", server, retries=2, **hurry(fault))
    assert [row.id for row in rows if seed_of(3, row.id) in victims] == []
    assert len(rows) == len(PROMPTS) - 2
    failed = failed_rows(tmp_path / "rows")
    assert failed.keys() == {prompt.id for prompt in PROMPTS[:2]}
    assert all(reason.startswith(FAULTS.get(fault, "HTTP 400: no")) for reason in failed.values())
    assert f"2 prompts failed: {FAULTS.get(fault, 'HTTP 400')}" in capsys.readouterr().out
    asked = [request["seed"] for request in server.requests if request["seed"] in victims]
    assert len(asked) == (2 if fault == 400 else 6)  # our own mistakes are not repeated

    quiet = serve()
    assert ask(tmp_path / "rows", quiet) == rows
    assert quiet.requests == []  # failed is failed, until asked for
    assert ask(tmp_path / "rows", quiet, retry_failed=True) == ask(tmp_path / "whole", serve())
    assert {request["seed"] for request in quiet.requests} == victims
    assert not (tmp_path / "rows" / "failed.jsonl").exists()


def test_prompts_with_tools_are_asked_by_their_tokens_alone(serve, ask, tokenizer, tmp_path, monkeypatch):
    shown = "{% if tools %}<|im_start|>{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", shown + tokenizer.chat_template)
    tools = {"role": "tools", "content": "", "tools": [{"type": "function", "function": {"name": "the cat"}}]}
    prompt = Prompt.of([tools, {"role": "user", "content": "what is this ?"}])
    server = serve()
    rows = {row.id: row for row in ask(tmp_path / "ids", server, prompts=[*PROMPTS, prompt])}
    start = rows[prompt.id].spans[0][0]
    read = tokenizer.decode(rows[prompt.id].input_ids[:start])
    assert read.startswith("<|im_start|>the cat<|im_end|>\n<|im_start|>user")
    ask(tmp_path / "chat", server, prompts=[*PROMPTS, prompt], api="chat")
    assert failures(tmp_path / "chat", skipped=True) == {
        "tools are declared, and over data.server.api=chat servers take calls apart; use completions": 1
    }


def test_when_no_prompt_is_answered_the_file_with_the_reasons_is_named(serve, ask, tmp_path):
    with pytest.raises(UserError, match=r"^no prompt was answered; .*failed\.jsonl says why, prompt by prompt$"):
        ask(tmp_path / "rows", serve(fault=lambda *_: 400))
    assert failed_rows(tmp_path / "rows").keys() == {prompt.id for prompt in PROMPTS}
    assert ask(tmp_path / "rows", serve(), retry_failed=True) == ask(tmp_path / "whole", serve())


def test_prompts_that_cannot_be_asked_are_skipped_and_told_apart_from_failures(serve, ask, tmp_path, capsys):
    huge = Prompt.of([{"role": "user", "content": "the cat " * 5000}])
    surrogate = Prompt.of([{"role": "user", "content": "half \ud800"}])
    victim = seed_of(3, PROMPTS[0].id)
    server = serve(fault=lambda request, _: 400 if request["seed"] == victim else None)
    prompts = [*PROMPTS, huge, surrogate]
    assert len(ask(tmp_path, server, prompts=prompts)) == len(PROMPTS) - 1
    told = capsys.readouterr().out
    assert ", 1 failed, 2 skipped" in told
    assert "1 prompts skipped: the prompt leaves no room for 5 tokens" in told
    assert f"the 2 skipped prompts are in {tmp_path / 'failed.jsonl'}\n" in told
    assert f"the 1 failed prompts are in {tmp_path / 'failed.jsonl'}; --retry-failed asks them again\n" in told
    assert failures(tmp_path).total() == 1
    assert failures(tmp_path, skipped=True).total() == 2
    quiet = serve()
    assert len(ask(tmp_path, quiet, prompts=prompts, retry_failed=True)) == len(PROMPTS)
    assert [request["seed"] for request in quiet.requests] == [victim]
    assert not failures(tmp_path)
    assert failed_rows(tmp_path) == {
        huge.id: "the prompt leaves no room for 5 tokens",
        surrogate.id: "the prompt holds half of a character (a lone surrogate)",
    }


def test_another_server_takes_over_from_one_that_dies(serve, ask, tmp_path):
    whole = ask(tmp_path / "whole", serve())
    steady, dying = serve(), serve()
    left = iter(range(3))

    def die(request, before):
        if next(left, None) is None:
            threading.Thread(target=dying.die).start()
            time.sleep(0.1)
            return "dropped"
        return None

    dying.fault = die
    assert ask(tmp_path / "rows", steady, dying) == whole
    assert len(steady.requests) > len(dying.requests) > 0


def test_no_question_is_spent_on_a_dead_server_twice(serve, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(openai_backend._Fleet, "_pause", lambda *_: 0.0)
    dead = serve()
    dead.fault = lambda request, before: "dropped"
    rows = ask(tmp_path / "rows", dead, serve(), retries=1, concurrency=1)
    assert rows == ask(tmp_path / "whole", serve())
    assert len(dead.requests) == len(rows)


def test_a_server_that_is_not_there_yet_does_not_stop_the_others(serve, ask, tmp_path):
    gone = serve()
    gone.die()
    assert ask(tmp_path / "rows", serve(), gone) == ask(tmp_path / "whole", serve())


def test_when_every_server_is_gone_the_run_stops_and_the_same_command_goes_on(serve, ask, tmp_path):
    whole = ask(tmp_path / "whole", serve())
    server = serve()
    left = iter(range(9))

    def die(request, before):
        if next(left, None) is None:
            threading.Thread(target=server.die).start()
            time.sleep(0.1)
            return "dropped"
        return None

    server.fault = die
    with pytest.raises(UserError, match=r"no server can be reached any more \(127.0.0.1:.*the same command goes on"):
        ask(tmp_path / "rows", server)
    assert not (tmp_path / "rows" / "failed.jsonl").exists()
    kept = (tmp_path / "rows" / "appended" / "rank-00000.jsonl").read_bytes().count(b"\n")
    assert kept >= 9 - 3  # answers on their way are lost with the connection
    again = serve(port=server.port)
    assert ask(tmp_path / "rows", again) == whole
    assert len(again.requests) == len(PROMPTS) - kept
    assert not any("failed" in json.loads(line) for line in (tmp_path / "rows" / "rows.jsonl").open())


def test_servers_that_answer_nothing_right_stop_the_run(serve, ask, tmp_path, monkeypatch):
    monkeypatch.setattr(openai_backend, "FAILURES_IN_A_ROW", 6)
    with pytest.raises(UserError, match=r"6 prompts in a row failed, the last one for: HTTP 500; .*--retry-failed"):
        ask(tmp_path, serve(fault=lambda *_: 500), retries=0)


def test_misconfigured_servers_are_told_before_any_work(serve, ask, tmp_path):
    gone = serve()
    gone.die()
    with pytest.raises(UserError, match=r"no server can be reached at 127.0.0.1:\d+; start one, or correct data"):
        ask(tmp_path, gone)
    other = serve(name="other")
    with pytest.raises(UserError, match=r"serves other and not tiny; set data\.server\.model"):
        ask(tmp_path, serve(), other)
    with pytest.raises(UserError, match=r"no completions API at this URL, or no model tiny \(HTTP 404\)"):
        ask(tmp_path, serve(fault=lambda *_: 404))
    assert other.requests == []


def test_the_key_comes_from_the_environment_and_is_never_shown(serve, ask, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(openai_backend.API_KEY, KEY)
    server = serve()
    server.fault = lambda request, before: 400 if request["seed"] == seed_of(3, PROMPTS[0].id) else None
    ask(tmp_path, server)
    assert server.keys == {f"Bearer {KEY}"}
    server.fault = lambda *_: 401
    with pytest.raises(UserError, match=r"refuses the key \(HTTP 401\); set MEDUSA_API_KEY") as caught:
        ask(tmp_path, server, retry_failed=True)
    shown = "".join(capfd.readouterr()) + str(caught.value)
    assert KEY not in shown
    assert failed_rows(tmp_path)[PROMPTS[0].id] == "HTTP 400: no, Bearer ***"
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_without_the_client_library_it_is_told_what_to_install(monkeypatch, limits):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"pip install 'medusa-train\[openai\]'"):
        answer_by_servers(Servers(["http://127.0.0.1:1/v1"], "tiny"), limits)


# Kills


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it."""


@pytest.mark.parametrize("error", [Killed(), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("writes", [0, 2])
def test_what_was_written_before_a_kill_or_a_full_disk_is_gone_on_from(
    serve, ask, tmp_path, monkeypatch, error, writes
):
    whole = ask(tmp_path / "whole", serve())
    left = iter(range(writes))

    def dying(path, records):
        if next(left, None) is None:
            raise error
        return append_jsonl(path, records)

    slow = serve(fault=lambda *_: time.sleep(0.03))
    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "append_jsonl", dying)
        with pytest.raises(type(error)):
            ask(tmp_path / "rows", slow)
    appended = tmp_path / "rows" / "appended" / "rank-00000.jsonl"
    kept = appended.read_bytes().count(b"\n") if appended.exists() else 0
    assert (kept > 0) == (writes > 0)
    if kept:
        with appended.open("ab") as file:
            file.write(b'{"id": "torn')
    again = serve()
    assert ask(tmp_path / "rows", again) == whole
    assert len(again.requests) == len(PROMPTS) - kept
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["rows.jsonl"]


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal has it: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_was_answered(serve, ask, tmp_path):
    whole = ask(tmp_path / "whole", serve())
    left = iter(range(10))

    def interrupt(request, before):
        time.sleep(0.02)
        number = next(left, None)
        if number == 9:  # once: a second one could arrive when the first has done its work
            os.kill(os.getpid(), signal.SIGINT)
        if number in (9, None):
            time.sleep(0.3)

    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path / "rows", serve(fault=interrupt))
    kept = (tmp_path / "rows" / "appended" / "rank-00000.jsonl").read_bytes().count(b"\n")
    assert 10 - 4 <= kept < len(PROMPTS)
    again = serve()
    assert ask(tmp_path / "rows", again) == whole
    assert len(again.requests) == len(PROMPTS) - kept


def test_a_run_goes_on_after_kill_9(serve, ask, tiny_chat_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    whole = ask(tmp_path / "whole", serve())
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"messages": p.messages}) + "\n" for p in PROMPTS))
    server = serve(fault=lambda *_: time.sleep(0.3))
    recipe = {
        "output_dir": str(tmp_path / "run"),
        "seed": 3,
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": MAX_NEW_TOKENS, "backend": "openai",
            "server": {"urls": [server.url], "model": "tiny", "concurrency": 1}, **SHARES,
        },
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    job = Job(load_recipe(tmp_path / "recipe.yaml"))
    run_stages(job, "prompts")
    process = subprocess.Popen(
        [sys.executable, "-m", "medusa_train.cli", "distill", str(tmp_path / "recipe.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    appended = tmp_path / "run" / "distill" / "appended" / "rank-00000.jsonl"
    until = time.monotonic() + 400
    while process.poll() is None and not (appended.exists() and appended.stat().st_size):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    asked, kept = len(server.requests), appended.read_bytes().count(b"\n")
    assert 0 < kept < len(PROMPTS)
    server.fault = lambda *_: None
    run_stages(job, "distill")
    assert len(server.requests) - asked == len(PROMPTS) - kept
    assert read_rows(tmp_path / "run" / "distill" / "rows.jsonl") == whole
    assert job.folder.result("distill")["result"]["rows"] == len(PROMPTS)


def test_failed_prompts_of_a_finished_run_are_asked_again_by_the_command(serve, command, tiny_chat_folder, tmp_path):
    victim = PROMPTS[5]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"messages": p.messages}) + "\n" for p in PROMPTS))
    server = serve(fault=lambda request, _: 400 if request["seed"] == seed_of(0, victim.id) else None)
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "output_dir": "run",
                "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
                "data": {
                    "prompts": "prompts.jsonl", "max_new_tokens": MAX_NEW_TOKENS, "backend": "openai",
                    "server": {"urls": [server.url], "model": "tiny"}, **SHARES,
                },
            }
        )
    )  # fmt: skip
    distill_command = ("distill", "recipe.yaml")
    code, out, error = command(*distill_command)
    assert code == 0, error
    assert "1 prompts failed: HTTP 400: no, Bearer none" in out
    assert "failed 1" in out
    whole = (tmp_path / "run" / "distill" / "rows.jsonl").read_bytes()
    server.fault, asked = lambda *_: None, len(server.requests)
    assert command(*distill_command)[0] == 0
    (tmp_path / "run" / "cache").mkdir()
    (tmp_path / "run" / "cache" / "recipe.json").write_text("{}")
    outcome = command(*distill_command, "--retry-failed")
    assert_refused(outcome, "cache was made of the rows without those that failed; use --overwrite")
    assert len(server.requests) == asked
    code, _, error = command(*distill_command, "--retry-failed", "--overwrite")
    assert code == 0, error
    assert [request["seed"] for request in server.requests[asked:]] == [seed_of(0, victim.id)]
    rows = tmp_path / "run" / "distill" / "rows.jsonl"
    assert {row.id for row in read_rows(rows)} == {prompt.id for prompt in PROMPTS}
    assert set(whole.splitlines()) < set(rows.read_bytes().splitlines())
    assert not (tmp_path / "run" / "cache").exists()
    assert command(*distill_command, "--retry-failed")[0] == 0
    assert len(server.requests) == asked + 1


def test_a_compact_order_of_prompts_is_that_of_their_ids():
    ids = np.array([int(prompt.id, 16) for prompt in PROMPTS], np.uint64)
    asking = Asking(None, PROMPTS, 8, None, None, **SHARES)
    names = [PROMPTS[place].id for place in asking.order(ids)]
    splits = [asking._split(name) for name in names]
    assert names == sorted(names, key=lambda name: (splits[names.index(name)] == "train", name))
