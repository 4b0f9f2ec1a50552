"""What a person sees when something goes wrong: one line, and an exit code that scripts can read."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from medusa_train.inference.errors import UserError


class Preempted(Exception):
    """A command was asked to stop (SIGTERM), saved where it was and goes on when it is called again."""


@contextmanager
def reporting_errors(debug: bool) -> Iterator[None]:
    """Turn errors that a user can mend into one line and exit code 2; anything else keeps its traceback."""
    # On CPUs with bf16 instructions it recommends a package whenever it is imported, wanted or not.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from here")
        sys.exit(130)
    except Preempted as preempted:
        _say(str(preempted))
        sys.exit(0)
    except Exception as error:
        message = explain(error)
        if message is None or debug:
            raise
        _say(message)
        sys.exit(2)


def explain(error: Exception) -> str | None:
    """One line for an error that a user can mend; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in text:
        return "the disk is full; free some space, and the same command goes on from here"
    # torch and safetensors hide the errno of a failed write.
    if "PytorchStreamWriter failed" in text or "file write failed" in text:
        return f"a file could not be written ({text[:120]}); is the disk full?"
    if isinstance(error, PermissionError):
        return f"no permission to write {error.filename}; use another --out"
    return None


def report_usage(error: typer.TyperException) -> None:
    """Say what is wrong with a command line, and where its help is."""
    # A parameter's error names the parameter in its formatted message alone.
    told = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
    message = " ".join(told.split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    if message:  # there is none where a command without words has shown its help
        _say(f"{message}; see {context.command_path if context else 'medusa-train'} --help")


def _say(message: str) -> None:
    sys.stderr.write(f"medusa-train: {message}\n")
