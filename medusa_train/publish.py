"""Heads to a repository on the Hugging Face Hub, in one commit.

Everything that can be refused is refused before the first request that changes anything. The client retries uploads by
itself; creating the repository and committing are retried here. All of it may be repeated: what the Hub has already
is not sent again, and equal files make no commit.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, errors, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

import medusa_train
from medusa_train.inference.checkpoint import CONFIG
from medusa_train.inference.errors import UserError
from medusa_train.release import CARD, PUBLISHED, Release, prepare_release

REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
WAITS = (2.0, 5.0, 15.0)  # seconds before a request is tried again
LONGEST_WAIT = 300.0  # seconds; what the Hub may ask for
TRANSIENT = (408, 429, 500, 502, 503, 504)
HTTPError = errors.HTTPError  # type: ignore[attr-defined]  # of whichever library the client speaks HTTP with

T = TypeVar("T")


def publish(
    heads: Path,
    repo_id: str,
    backbone: str = "",
    public: bool = False,
    revision: str = "main",
    message: str = "",
    dry_run: bool = False,
) -> list[str]:
    """Publish a run's heads; the token is the environment's (``HF_TOKEN``) or the client's own login.

    Args:
        heads: ``heads`` of a finished run.
        repo_id: ``user/name``.
        backbone: see `release.prepare_release`.
        public: whether a new repository is public.
        revision: branch to commit to, made if missing.
        message: of the commit.
        dry_run: say what would be published, without asking the Hub anything.

    Returns:
        What a person wants to know, a line each.

    Raises:
        UserError: heads or repository are refused (see `release.prepare_release` and `check_repository`), or the Hub
            cannot be reached or refuses.
    """
    for what, name in (("repository", repo_id), ("--backbone", backbone)):
        if name:
            check_repository_name(what, name)
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise UserError(f"--revision {revision!r} is no name of a branch; use letters, digits, . _ - and /")
    if not dry_run and get_token() is None:
        raise UserError("no token for the Hub; set HF_TOKEN to one that may write, or run: hf auth login")
    release = prepare_release(heads, repo_id, backbone)
    if dry_run:
        card = release.card({})
        sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in release.files.items()}
        listed = [f"{size:>14,}  {name}" for name, size in sorted((sizes | {CARD: len(card.encode())}).items())]
        return [f"{repo_id}, {_visibility(public)}, branch {revision}:", *listed, "", card]
    api = HfApi(library_name="medusa-train", library_version=medusa_train.__version__)
    with hub_errors(repo_id):
        licence = backbone_licence(api, release)
        exists = check_repository(api, release, revision, public)
        if not exists:
            patiently(lambda: api.create_repo(repo_id, private=not public, exist_ok=True))
        if revision != "main":
            patiently(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
        contents = release.files | {CARD: release.card(licence).encode()}
        words = message or f"Medusa heads for {release.backbone}"
        # Operations remember their upload, so every try gets new ones.
        commit = patiently(
            lambda: api.create_commit(
                repo_id,
                [CommitOperationAdd(name, content) for name, content in contents.items()],
                commit_message=words,
                revision=revision,
            )
        )
    return [
        f"published         {api.endpoint}/{repo_id} ({_visibility(public) if not exists else 'visibility as it was'})",
        f"revision          {commit.oid}",
        f'load              MedusaModel.from_pretrained("{repo_id}", revision="{commit.oid}")',
    ]


def check_repository_name(what: str, name: str) -> None:
    """Refuse what the Hub would not take as ``user/repository``.

    Raises:
        UserError: the reason.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{what} {name!r}: {' '.join(str(error).split())[:200]}") from error
    if name.count("/") != 1:
        raise UserError(f"{what} {name!r}: name it as user/repository")


def backbone_licence(api: HfApi, release: Release) -> dict[str, str]:
    """What the backbone's card says of its licence, for the heads' card; {} if it says nothing.

    Raises:
        UserError: there is no such backbone, or it has other sizes than the heads.
    """
    backbone = release.backbone
    try:
        info = patiently(lambda: api.model_info(backbone))
    except GatedRepoError:
        return {}
    except RepositoryNotFoundError as error:
        raise UserError(f"backbone {backbone}: no such repository on the Hub; name another with --backbone") from error
    theirs = _read_config(api, backbone, "main")
    for key in ("hidden_size", "vocab_size"):
        # Models with several parts keep these a level deeper.
        found = theirs.get(key, theirs.get("text_config", {}).get(key))
        if found is not None and found != release.config[key]:
            raise UserError(
                f"backbone mismatch: the heads are for {key} {release.config[key]}, {backbone} has {found}; "
                "name the right one with --backbone"
            )
    card: Any = info.card_data or {}
    names = ("license", "license_name", "license_link")
    return {name: card.get(name) for name in names if isinstance(card.get(name), str)}


def check_repository(api: HfApi, release: Release, revision: str, public: bool) -> bool:
    """Whether the repository is there already.

    Raises:
        UserError: it holds something else than heads for this backbone, or everybody would see what was meant to be
            private.
    """
    repo_id = release.repo_id
    try:
        info = patiently(lambda: api.model_info(repo_id))
    except RepositoryNotFoundError:
        return False
    if not info.private and not public:
        raise UserError(f"{repo_id} is public; add --public, or publish to another repository")
    if foreign := sorted({file.rfilename for file in info.siblings or ()} - PUBLISHED):
        raise UserError(f"{repo_id} holds {foreign[0]}, which is not of heads; publish to another repository")
    theirs = _read_config(api, repo_id, revision) or _read_config(api, repo_id, "main")
    for key in ("base_model_name_or_path", "hidden_size", "vocab_size"):
        if theirs and theirs.get(key) != release.config[key]:
            raise UserError(
                f"backbone mismatch: {repo_id} holds heads for {theirs.get('base_model_name_or_path')} ({key} "
                f"{theirs.get(key)}), these are for {release.backbone} ({release.config[key]}); use another repository"
            )
    return True


def patiently(call: Callable[[], T]) -> T:
    """``call``, tried again where the Hub was busy or not there for a moment."""
    for wait in (*WAITS, None):
        try:
            return call()
        except HTTPError as error:
            response = error.response if isinstance(error, HfHubHTTPError) else None
            if wait is None or (response is not None and response.status_code not in TRANSIENT):
                raise
            time.sleep(wait if response is None else _asked_wait(response.headers) or wait)
    raise AssertionError("the last try returns or raises")


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Errors of the client as one line each; none of them shows a token.

    Raises:
        UserError: for anything that the client raises.
    """
    try:
        yield
    except HfHubHTTPError as error:
        raise UserError(f"{repo_id}: {_why(error)}") from error
    except (HTTPError, OSError, RuntimeError) as error:  # offline mode and sockets; what uploads through Xet raise
        raise UserError(
            f"{repo_id}: the Hub cannot be reached ({_one_line(error)}); the same command goes on from here"
        ) from error
    except ValueError as error:  # the Hub found fault with the card
        raise UserError(f"{repo_id}: {_one_line(error)}") from error


def _why(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in (401, 403):
        return f"the Hub refused the token ({status}); it must be valid and allowed to write there"
    if status == 429:
        return "the Hub takes no more requests for now (429); the same command goes on from here later"
    if status >= 500:
        return f"the Hub failed ({status}); the same command goes on from here"
    return f"the Hub refused ({_one_line(error)})"


def _one_line(error: Exception) -> str:
    text, token = " ".join(str(error).split())[:200], get_token()
    return text.replace(token, "[token]") if token else text


def _asked_wait(headers: Any) -> float | None:
    """Seconds that a response asks to wait, at most ``LONGEST_WAIT``."""
    found = re.fullmatch(r"\d+", headers.get("Retry-After", "")) or re.search(
        r"(?<=t=)\d+", headers.get("RateLimit", "")
    )
    return min(float(found[0]), LONGEST_WAIT) if found else None


def _read_config(api: HfApi, repo_id: str, revision: str) -> dict[str, Any]:
    """A repository's ``config.json``; {} where there is none, or none that may be read."""
    with tempfile.TemporaryDirectory() as folder:  # half a repository in the client's cache would look like a whole one
        try:
            path = patiently(lambda: api.hf_hub_download(repo_id, CONFIG, revision=revision, local_dir=folder))
        except (EntryNotFoundError, RevisionNotFoundError, GatedRepoError):
            return {}
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _visibility(public: bool) -> str:
    return "public" if public else "private"
