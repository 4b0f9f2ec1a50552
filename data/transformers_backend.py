"""Answers from the backbone in this process, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from medusa_train.data.asking import Asking, Question, seed_of
from medusa_train.data.chat import Span
from medusa_train.data.distill import Backend
from medusa_train.data.generation import generate_batch
from medusa_train.data.hidden_states import keep_states
from medusa_train.data.journal import WAITING, Failure, Journal
from medusa_train.data.progress import AnswerProgress
from medusa_train.data.rows import Prompt, Row, append_jsonl
from medusa_train.inference.backbone import Backbone


def answer_here(backbone: Backbone, batch_size: int, states_folder: Path | None) -> Backend:
    """The backend that answers in this process, in batches of one temperature.

    Token ids are stored as the model made them, so labels never depend on re-tokenizing text. Batches are fixed by
    the prompts alone, and processes of a launch take turns at them. Each writes the hidden states of its answers to a
    file in ``states_folder`` (see `keep_states`; None keeps no states), then appends its rows in one write: a row never
    comes without its states. A resumed run answers the batches that miss a row, as a whole and so exactly as an
    unbroken run, and appends only the missing rows.
    """
    return partial(_answer_batches, backbone, batch_size, states_folder)


def _answer_batches(
    backbone: Backbone, batch_size: int, states_folder: Path | None, asking: Asking, order: NDArray[np.int64],
    journal: Journal, progress: AnswerProgress,
) -> list[int]:  # fmt: skip
    state = PartialState()
    ranks, budget = state.num_processes, asking.answer_tokens
    chosen: list[int] = []
    written = 0
    batches = enumerate(_batches(asking, order, journal, batch_size, progress))
    while turns := list(islice(batches, ranks)):
        for number, members in turns[state.process_index : state.process_index + 1]:
            if any(journal.status[place] == WAITING for place, _ in members):
                questions = [question for _, question in members]
                waiting = [journal.status[place] == WAITING for place, _ in members]

                def wrote(member: int, tokens: int, waiting: Sequence[bool] = tuple(waiting)) -> None:
                    progress.write(tokens if waiting[member] else 0)

                rows, states = _answer(backbone, questions, asking.max_new_tokens, asking.next_turn, asking.seed, wrote)
                if states_folder:
                    keep_states(states_folder / f"batch-{number:05d}.safetensors", rows, states)
                missing = [row for row, is_missing in zip(rows, waiting, strict=True) if is_missing]
                journal.append(missing)
                progress.advance(0, len(missing))  # their tokens were counted as they were written
        told = [[int(journal.tokens[place]) for place, _ in members] for _, members in turns]
        if budget is not None and ranks > 1:  # each process knows the tokens of its own batches
            mine = told[state.process_index] if state.process_index < len(told) else []
            told = gather_object([mine])
        # Counted batch by batch, also what was there before: a resumed run stops where an unbroken one would.
        for (_, members), tokens in zip(turns, told, strict=False):
            if budget is None or written < budget:
                chosen += [place for place, _ in members]
                written += sum(tokens)
        if budget is not None and written >= budget:
            break
    return chosen


def _batches(
    asking: Asking, order: NDArray[np.int64], journal: Journal, batch_size: int, progress: AnswerProgress
) -> Iterator[list[tuple[int, Question]]]:
    """Questions that are answered together; prompts that cannot be asked are noted as skipped by the first process."""
    open_batches: dict[float, list[tuple[int, Question]]] = {}
    for place in order.tolist():
        question = asking.question(asking.prompts[place])
        if isinstance(question, Failure):
            if PartialState().is_main_process and journal.status[place] == WAITING:
                journal.append([question])
                progress.skip()
            continue
        batch = open_batches.setdefault(question.temperature, [])
        batch.append((place, question))
        if len(batch) == batch_size:
            yield open_batches.pop(question.temperature)
    yield from open_batches.values()


def _answer(
    backbone: Backbone,
    batch: Sequence[Question],
    max_new_tokens: int,
    next_turn: Callable[[Question, list[int], Sequence[Span]], list[int] | None],
    seed: int,
    wrote: Callable[[int, int], None] = lambda member, tokens: None,
) -> tuple[list[Row], list[Tensor]]:
    """Rows, and for each the hidden states that its answers' tokens were chosen from.

    Args:
        wrote: told, as it happens, which member of the batch wrote how many tokens.
    """
    eos = backbone.eos_token_ids
    texts = [question.ids for question in batch]
    spans: list[list[Span]] = [[] for _ in batch]
    states: list[list[Tensor]] = [[] for _ in batch]
    talking, turn = list(range(len(batch))), 0
    while talking:

        def keep(row: int, hidden: Tensor, members: Sequence[int] = tuple(talking)) -> None:
            states[members[row]].append(hidden)
            wrote(members[row], len(hidden))

        seeds = [seed_of(seed, batch[member].prompt.id, turn) for member in talking]
        prompts = [texts[member] for member in talking]
        temperature = batch[0].temperature
        answers = generate_batch(backbone, prompts, max_new_tokens, eos, temperature, seed=seeds, states=keep)
        going_on = []
        for member, answer in zip(talking, answers, strict=True):
            spans[member].append((len(texts[member]), len(texts[member]) + len(answer)))
            texts[member] = texts[member] + answer
            ended = answer[-1] in eos
            longer = next_turn(batch[member], texts[member], spans[member]) if ended else None
            if longer is not None:
                texts[member] = longer
                going_on.append(member)
        talking, turn = going_on, turn + 1
    rows = [
        question.row(ids, found, "stop" if ids[-1] in eos else "length")
        for question, ids, found in zip(batch, texts, spans, strict=True)
    ]
    return rows, [torch.cat(pieces) for pieces in states]


def answer_again(
    backbone: Backbone, rows: Sequence[Row], path: Path, states_folder: Path, max_new_tokens: int, batch_size: int
) -> list[Row]:
    """The answers of a changed backbone to the prompts of distilled ``rows``; written and returned.

    Args:
        states_folder: gets their hidden states, as in `distill`.
    """
    path.unlink(missing_ok=True)
    answered: list[Row] = []
    for number, start in enumerate(tqdm(range(0, len(rows), batch_size), desc="answer again", unit="batch")):
        members = rows[start : start + batch_size]
        questions = [
            Question(Prompt(row.id, row.messages), row.split, row.input_ids[: row.spans[0][0]], 0.0, 0)
            for row in members
        ]
        made, states = _answer(backbone, questions, max_new_tokens, lambda *_: None, 0)
        keep_states(states_folder / f"batch-{number:05d}.safetensors", made, states)
        append_jsonl(path, made)
        answered += made
    return answered
