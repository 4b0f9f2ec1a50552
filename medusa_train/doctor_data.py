"""What is known of a run's rows before its stages ran: the rows there are, or what their source will give.

Nothing is written; of a source only the first records are read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import encode_conversation, render_prompt
from medusa_train.data.prompts import load_conversations, load_records, normalized, prompt_of
from medusa_train.data.rows import Prompt, Row, read_prompts, read_rows, split_of
from medusa_train.inference.errors import UserError
from medusa_train.recipe import Recipe
from medusa_train.run_folder import RunFolder

LOOK_AT = 2000  # records of a source that are read; a preflight must not take as long as the stage


@dataclass
class Data:
    """What is known of the rows now.

    Attributes:
        rows: the rows, if there are any yet.
        origin: where the figures come from, in words.
        dropped: reason -> records that will not become rows.
        prompts: how many prompts will be answered, if that is known.
    """

    rows: list[Row]
    origin: str
    dropped: Counter[str]
    prompts: int | None = None


def find_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, max_positions: int | None) -> Data:
    """Rows of the distill stage; else what its source would give, as far as that can be known before.

    Args:
        max_positions: longest text of the backbone, if its config says.

    Raises:
        UserError: the source, or what stages wrote, cannot be read.
    """
    section, folder = recipe.data, RunFolder(recipe)
    path = folder.stage("distill") / "rows.jsonl"
    prompts_path = folder.stage("prompts") / "prompts.jsonl"
    rows = read_rows(path) if path.exists() and path.stat().st_size else []
    if section.conversations:
        data = _scan_conversations(recipe, tokenizer)
    elif prompts_path.exists():
        data = _scan_prompts(recipe, tokenizer, max_positions, read_prompts(prompts_path), str(prompts_path))
    elif section.prompts == "synthesize":
        data = Data([], "the backbone will write the prompts", Counter(), section.num_prompts or 1000)
    else:
        data = _scan_prompt_source(recipe, tokenizer, max_positions)
    if rows:
        if missing := (data.prompts or 0) - len(rows):
            waiting = "not answered (data.answer_tokens reached, or distilling is not done)"
            data.dropped += Counter({waiting: max(0, missing)})
        return Data(rows, str(path), data.dropped)
    return data


def _scan_conversations(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Data:
    """The rows that the first conversations of the source will give, and why others give none."""
    section = recipe.data
    rows: dict[str, Row] = {}
    dropped: Counter[str] = Counter()
    source = str(section.conversations)
    for messages in islice(load_conversations(source, section.prompts_split), LOOK_AT):
        try:
            ids, spans = encode_conversation(tokenizer, messages)
        except UserError as error:
            dropped[str(error)] += 1
            continue
        spans = [(start, min(end, section.max_length)) for start, end in spans if start < section.max_length]
        if not spans:
            dropped["no assistant token before data.max_length"] += 1
            continue
        first = next(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
        split = split_of(Prompt.of(messages[:first]).id, section.calibration_share, section.heldout_share)
        row = Row(Prompt.of(messages).id, split, messages[:first], ids[: section.max_length], spans, "given")
        dropped["the same conversation again"] += row.id in rows
        rows[row.id] = row
    looked = len(rows) + dropped.total()
    origin = f"{source}, its first {LOOK_AT:,} conversations" if looked == LOOK_AT else source
    return Data(list(rows.values()), origin, dropped)


def _scan_prompt_source(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, max_positions: int | None) -> Data:
    section = recipe.data
    prompts: dict[str, Prompt] = {}
    dropped: Counter[str] = Counter()
    looked = 0
    for record in islice(load_records(section.prompts, section.prompts_split), LOOK_AT):
        if section.num_prompts and len(prompts) == section.num_prompts:
            break
        looked += 1
        if not (messages := prompt_of(record, section.prompts)):
            dropped["no text of a user"] += 1
            continue
        prompt = Prompt.of(messages)
        dropped["the same prompt again"] += normalized(prompt) in prompts
        prompts.setdefault(normalized(prompt), prompt)
    origin = f"{section.prompts}, its first {LOOK_AT:,} records" if looked == LOOK_AT else section.prompts
    data = _scan_prompts(recipe, tokenizer, max_positions, list(prompts.values()), origin)
    data.dropped += dropped
    return data


def _scan_prompts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, max_positions: int | None, prompts: list[Prompt], origin: str
) -> Data:
    dropped: Counter[str] = Counter()
    no_room = f"no room for {recipe.data.max_new_tokens} tokens within the model's {max_positions} positions"
    for prompt in prompts:
        try:
            length = len(render_prompt(tokenizer, prompt.messages))
        except UserError as error:
            dropped[str(error)] += 1
            continue
        if max_positions and length > max_positions - recipe.data.max_new_tokens:
            dropped[no_room] += 1
    return Data([], origin, dropped, len(prompts) - dropped.total())
