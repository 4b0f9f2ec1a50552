"""Self-distillation: the backbone answers the prompts, and its own tokens become the training text.

What is asked is in `asking`; who answers is a backend, the model in this process (`transformers_backend`) or servers
(`openai_backend`); what became of every prompt is kept by a `Journal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from accelerate import PartialState
from numpy.typing import NDArray
from tqdm import tqdm

from medusa_train.data.asking import Asking
from medusa_train.data.journal import FAILURES, ROWS, WAITING, Failure, Journal
from medusa_train.data.progress import AnswerProgress
from medusa_train.data.rows import SPLITS, JsonLines, open_rows
from medusa_train.inference.errors import UserError

# Appends outcomes for all prompts in the order of asking; returns the prompts whose answers are wanted, in order.
Backend = Callable[[Asking, NDArray[np.int64], Journal, AnswerProgress], Sequence[int] | NDArray[np.int64]]


def distill(asking: Asking, folder: Path, backend: Backend, retry_failed: bool = False) -> None:
    """Answer the prompts into ``rows.jsonl`` of a folder; goes on with what is there.

    Every prompt that was asked ends either there or in ``failed.jsonl``, once, whatever came between. The rows are the
    same whatever order the answers came in.

    Args:
        retry_failed: ask those again that failed before.

    Raises:
        UserError: no prompt was answered, a split got no row, or the backend cannot go on.
    """
    state, ids = PartialState(), asking.ids()
    order = asking.order(ids)
    journal = Journal(folder, ids, state.process_index, retry_failed)
    state.wait_for_everyone()  # before anyone appends, every process has read what was there
    answered = int((journal.status != WAITING).sum())
    with AnswerProgress(len(ids), asking.answer_tokens, answered, int(journal.tokens.sum())) as progress:
        chosen = backend(asking, order, journal, progress)
    state.wait_for_everyone()
    if state.is_main_process:
        whole = Journal(folder, ids, state.process_index, retry_failed) if state.num_processes > 1 else journal
        whole.finish(chosen)
        _tell_failures(folder)
        if not (folder / ROWS).stat().st_size:
            raise UserError(f"no prompt was answered; {folder / FAILURES} says why, prompt by prompt")
        total = int(whole.tokens[np.asarray(chosen, dtype=np.int64)].sum())
        if asking.answer_tokens is not None and total < asking.answer_tokens:
            tqdm.write(
                f"distill: the prompts gave {total} answer tokens of the {asking.answer_tokens} wanted; "
                "raise data.num_prompts"
            )
        check_splits(folder / ROWS)
    state.wait_for_everyone()


def failures(folder: Path, skipped: bool = False) -> Counter[str]:
    """Reason -> prompts that failed for it; or that were ``skipped``, since they can never be asked."""
    records = JsonLines(folder / FAILURES, lambda record: Failure(**record))
    return Counter(record.failed for record in records if record.skipped == skipped) if len(records) else Counter()


def _tell_failures(folder: Path) -> None:
    for kind, skipped, then in (("skipped", True, ""), ("failed", False, "; --retry-failed asks them again")):
        reasons = failures(folder, skipped)
        for reason, count in reasons.most_common(5):
            tqdm.write(f"distill: {count} prompts {kind}: {reason}")
        if reasons:
            tqdm.write(f"distill: the {reasons.total()} {kind} prompts are in {folder / FAILURES}{then}")


def check_splits(path: Path) -> None:
    """Refuse rows that leave a split empty.

    Raises:
        UserError: they do; what to change is told.
    """
    found = {row.split for row in open_rows(path)}
    advice = {"train": "lower data.calibration_share and data.heldout_share"}
    for split in SPLITS:
        if split not in found:
            more = advice.get(split, f"raise data.{split}_share")
            raise UserError(f"no row fell into the {split} split; give more prompts or {more}")
