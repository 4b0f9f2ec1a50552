"""What is known of a run's rows before its stages ran: the rows there are, or what their source will give.

Nothing is written; of a source only the first records are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import render_prompt
from medusa_train.data.conversations import conversation_rows
from medusa_train.data.prompts import check_prompt, gather_prompts, load_conversations, names_of
from medusa_train.data.rows import Prompt, Row, read_prompts, read_rows
from medusa_train.data.sources import Source
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
    elif not section.sources("prompts"):
        data = Data([], "the backbone will write the prompts", Counter(), section.synthesized)
    else:
        data = _scan_prompt_sources(recipe, tokenizer, max_positions)
    if rows:
        if missing := (data.prompts or 0) - len(rows):
            waiting = "not answered (data.answer_tokens reached, or distilling is not done)"
            data.dropped += Counter({waiting: max(0, missing)})
        return Data(rows, str(path), data.dropped)
    return data


def _scan_conversations(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Data:
    """The rows that the first conversations of the sources will give, and why others give none."""
    section, dropped, sources = recipe.data, Counter[str](), recipe.data.sources("conversations")
    conversations = islice(load_conversations(sources, section.on_bad_rows, dropped), LOOK_AT)
    rows = list(
        conversation_rows(
            tokenizer, conversations, section.max_length, section.calibration_share, section.heldout_share, dropped
        )
    )
    return Data(rows, _looked(sources, len(rows) + dropped.total()), dropped)


def _scan_prompt_sources(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, max_positions: int | None) -> Data:
    section, dropped, sources = recipe.data, Counter[str](), recipe.data.sources("prompts")
    prompts: list[Prompt] = []
    for source in sources:
        found = gather_prompts(
            [source], None, recipe.seed, section.on_bad_rows, dropped, partial(check_prompt, tokenizer)
        )
        prompts += islice(found, LOOK_AT)
    looked = _looked(sources, len(prompts) + dropped.total())
    if section.num_prompts:
        prompts = prompts[: section.num_prompts - section.synthesized]
    data = _scan_prompts(recipe, tokenizer, max_positions, prompts, looked)
    data.dropped += dropped
    if section.synthesized:
        data.origin += f", and the backbone will write {section.synthesized:,} prompts"
        data.prompts = (data.prompts or 0) + section.synthesized
    return data


def _looked(sources: Sequence[Source], records: int) -> str:
    return names_of(sources) + (f", the first {LOOK_AT:,} of each" if records >= LOOK_AT else "")


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
