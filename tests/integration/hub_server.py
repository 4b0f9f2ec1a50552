"""A Hub on this machine: enough of its HTTP interface for the real client to create, commit, list and download.

``HubServer`` keeps repositories in memory and can misbehave on request. Clients read ``HF_ENDPOINT`` when they are
imported, so either start them in a process of their own with ``server.environment()``, or use `pointed_at` in this one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_" + "s3cretTokenOfTheTests"
_KIND = {"models": "model", "datasets": "dataset"}


@dataclass
class Repo:
    """Branches and commits; a commit is its files, all of them."""

    private: bool = True
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    messages: list[str] = field(default_factory=list)
    card: dict[str, object] = field(default_factory=dict)

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        """Put ``files`` on top of a branch; returns the commit's id."""
        whole = self.files(branch) | files
        oid = hashlib.sha1(repr((len(self.commits), branch, sorted(whole.items()))).encode()).hexdigest()
        self.commits[oid], self.branches[branch] = whole, oid
        self.messages.append(message)
        return oid

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.resolve(revision) or ""]


@dataclass
class Fault:
    """The next ``times`` requests with this method whose path holds ``part`` fail.

    ``status`` 0 reads half of what the client sends and closes the connection.
    """

    method: str
    part: str
    status: int
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


class HubServer:
    """A running server; `close` it, or use it in a ``with`` statement.

    Attributes:
        repos: by ``(type, id)``, type ``model`` or ``dataset``.
        large: contents by SHA-256 that were uploaded, committed or not.
        faults: what is to go wrong next.
        requests: ``(method, path)`` of every request.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.large: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.closed = False
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.hub = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True  # connections that are kept open would be answered still
        self._http.shutdown()
        self._http.server_close()

    def put(self, repo_id: str, files: dict[str, bytes], kind: str = "model", private: bool = False) -> Repo:
        """Make a repository, or a further commit of one, without a client."""
        repo = self.repos.setdefault((kind, repo_id), Repo(private))
        repo.commit(files)
        return repo

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Variables for a process that takes this server for the Hub, with a cache of its own."""
        kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        return kept | ours | more


@contextmanager
def pointed_at(server: HubServer, home: Path, token: str | None = TOKEN) -> Iterator[None]:
    """Make the Hub's client in this process, imported already, use the server."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        patch.delenv("HF_TOKEN", raising=False)
        if token:
            patch.setenv("HF_TOKEN", token)
        yield


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *arguments: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        if self.hub.closed:
            self.close_connection = True
            return None
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        length = int(self.headers.get("Content-Length") or 0)
        fault = next((f for f in self.hub.faults if f.method == self.command and f.part in path and f.times), None)
        if fault:
            fault.times -= 1
            if not fault.status:
                self.rfile.read(length // 2)
                self.close_connection = True
                return None
            self.rfile.read(length)
            return self._send(fault.status, {"error": "as asked"}, fault.headers)
        body = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(length)
        writes = self.command in ("POST", "PUT") and not path.startswith("/lfs/")
        if writes and not self._authorized():
            return self._send(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            self.hub.large[found[1]] = body
            return self._send(200 if hashlib.sha256(body).hexdigest() == found[1] else 400, {})
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(body))
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(\w[\w-]*)(?:/(.+))?)?", path):
            return self._api(_KIND[found[1]], found[2], found[3] or "revision", found[4] or "main", body)
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file("dataset" if found[1] else "model", found[2], found[3], found[4])
        return self._send(404, {"error": "Not found"})

    def _create(self, asked: dict[str, str]) -> None:
        key = (asked.get("type", "model"), f"{asked['organization']}/{asked['name']}")
        url = f"{self.hub.url}/{'datasets/' if key[0] == 'dataset' else ''}{key[1]}"
        if key in self.hub.repos:
            return self._send(409, {"error": "You already created this repo", "url": url})
        self.hub.repos[key] = Repo(private=asked.get("visibility") == "private")
        return self._send(200, {"url": url})

    def _batch(self, asked: dict[str, list[dict[str, object]]]) -> None:
        objects = [
            dict(thing)
            if thing["oid"] in self.hub.large
            else thing | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{thing['oid']}"}}}
            for thing in asked["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _api(self, kind: str, repo_id: str, verb: str, revision: str, body: bytes) -> None:
        repo = self._repo(kind, repo_id)
        if repo is None:
            return None
        if verb == "branch":
            if revision in repo.branches:
                return self._send(409, {"error": "Reference already exists"})
            repo.branches[revision] = repo.branches["main"]
            return self._send(200, {})
        under = ""
        if verb == "tree":
            revision, _, under = revision.partition("/")
        oid = repo.resolve(revision)
        if oid is None:
            return self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        files = repo.commits[oid]
        if verb == "revision":
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repo_id, "sha": oid, "private": repo.private, "siblings": siblings, "cardData": repo.card}
            return self._send(200, info | {"lastModified": "2024-01-01T00:00:00.000Z", "tags": [], "downloads": 0})
        if verb == "tree":
            deep = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
            return self._send(200, _listing(files, under, deep))
        if verb == "preupload":
            asked = json.loads(body)["files"]
            return self._send(200, {"files": [_upload_mode(thing, files.get(thing["path"])) for thing in asked]})
        if verb == "commit":
            return self._commit(repo, repo_id, revision, [json.loads(line) for line in body.splitlines()])
        return self._send(404, {"error": f"no {verb}"})

    def _commit(self, repo: Repo, repo_id: str, branch: str, lines: list[dict[str, dict[str, str]]]) -> None:
        kinds = {"header": {}, "file": {}, "lfsFile": {}}
        message = ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            else:
                kinds[str(line["key"])][value["path"]] = (
                    base64.b64decode(value["content"]) if line["key"] == "file" else self.hub.large[value["oid"]]
                )
        oid = repo.commit(kinds["file"] | kinds["lfsFile"], branch, message)
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}", "commitOid": oid})

    def _file(self, kind: str, repo_id: str, revision: str, name: str) -> None:
        repo = self._repo(kind, repo_id)
        if repo is None:
            return None
        oid = repo.resolve(revision)
        if oid is None:
            return self._send(404, {}, {"X-Error-Code": "RevisionNotFound"})
        content = repo.commits[oid].get(name)
        if content is None:
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid})
        return self._send(200, content, {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

    def _repo(self, kind: str, repo_id: str) -> Repo | None:
        repo = self.hub.repos.get((kind, repo_id))
        if repo is None or (repo.private and not self._authorized()):
            self._send(401 if repo or not self._authorized() else 404, {}, {"X-Error-Code": "RepoNotFound"})
            return None
        return repo

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _send(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".parquet"))


def _listing(files: dict[str, bytes], under: str, deep: bool) -> list[dict[str, object]]:
    """What lies in a folder, and, if ``deep``, in those within it."""
    start = f"{under}/" if under else ""
    inside = {name: content for name, content in files.items() if name.startswith(start)}
    here = {name.removeprefix(start).partition("/")[0] for name in inside}
    folders = sorted(name for name in here if start + name not in inside)
    found: list[dict[str, object]] = [{"type": "directory", "path": start + name, "oid": "0" * 40} for name in folders]
    return found + [_entry(name, inside[name]) for name in inside if deep or "/" not in name.removeprefix(start)]


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": _blob_id(content)}
    if _is_large(name):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _upload_mode(asked: dict[str, str], there: bytes | None) -> dict[str, object]:
    large = _is_large(asked["path"])
    answer: dict[str, object] = {"path": asked["path"], "uploadMode": "lfs" if large else "regular"}
    if there is not None:
        answer["oid"] = hashlib.sha256(there).hexdigest() if large else _blob_id(there)
    return answer | {"shouldIgnore": False}


def _blob_id(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
