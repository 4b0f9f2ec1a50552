"""Talking to a model with heads in a terminal, tokens shown as they come."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from tokenizers.decoders import DecodeStream

from medusa_train.data.chat import Message, load_chat_tokenizer, render_prompt
from medusa_train.inference.drafters import Drafter, NoDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.prompt_lookup import MedusaLookupDrafter, PromptLookupDrafter
from medusa_train.inference.stats import DecodeStats

DrafterName = Literal["medusa", "adaptive", "medusa-lookup", "lookup", "plain"]


def check_drafter(name: str) -> None:
    """Refuse a name that no drafter has.

    Raises:
        UserError: the names that there are.
    """
    if name not in (names := get_args(DrafterName)):
        raise UserError(f"no drafter {name!r}; there are {', '.join(names)}")


def make_drafter(model: MedusaModel, name: str) -> Drafter:
    """A drafter by its name on the command line.

    Raises:
        UserError: no such drafter, or these heads cannot serve it.
    """
    check_drafter(name)
    if name == "medusa":
        return model.drafter
    if name == "adaptive":
        return model.adaptive_drafter()
    if name == "medusa-lookup":
        return MedusaLookupDrafter(model.drafter)
    if name == "lookup":
        return PromptLookupDrafter()
    return NoDrafter()


class Chat:
    """Heads, their backbone and its tokenizer.

    Attributes:
        totals: counters of every answer so far.
    """

    def __init__(
        self,
        heads: str,
        backbone: str | None = None,
        drafter: str = "medusa",
        compiled: bool = False,
        revision: str | None = None,
    ) -> None:
        check_drafter(drafter)  # before minutes of loading
        model = MedusaModel.from_pretrained(heads, backbone, revision=revision)
        self.model = model.compiled() if compiled else model
        self.drafter = make_drafter(self.model, drafter)
        self.tokenizer = load_chat_tokenizer(self.model.backbone.source)
        self.totals = DecodeStats()

    def answer(
        self, messages: Sequence[Message], max_new_tokens: int, temperature: float, seed: int, color: bool
    ) -> str:
        """Show the answer as it comes and what it cost; returns the text.

        On a terminal, with ``color``, drafted tokens are green (they came without a backbone pass of their own) and the
        figures run along below. Elsewhere the text goes to standard output and one line of figures to standard error.
        """
        stats = DecodeStats()
        pieces = self._pieces(messages, max_new_tokens, temperature, seed, stats)
        console = Console(highlight=False)
        text = _show_live(pieces, stats, console) if color and console.is_terminal else _show_plain(pieces, stats)
        self.totals.add(stats)
        return text

    def _pieces(
        self, messages: Sequence[Message], max_new_tokens: int, temperature: float, seed: int, stats: DecodeStats
    ) -> Iterator[list[tuple[str, bool]]]:
        """Per step, the text of each token and whether it was drafted."""
        prompt = torch.tensor(render_prompt(self.tokenizer, messages))
        decoder = DecodeStream(skip_special_tokens=True)
        generator = torch.Generator(self.model.backbone.device).manual_seed(seed)
        for block in self.model.stream(
            prompt, max_new_tokens, temperature=temperature, generator=generator, drafter=self.drafter, stats=stats
        ):
            yield [
                (decoder.step(self.tokenizer.backend_tokenizer, token) or "", place < block.drafted)
                for place, token in enumerate(block.tokens)
            ]


def _show_plain(steps: Iterator[list[tuple[str, bool]]], stats: DecodeStats) -> str:
    text = ""
    for step in steps:
        words = "".join(piece for piece, _ in step)
        text += words
        sys.stdout.write(words)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stderr.write(_figures(stats) + "\n")
    return text


def _show_live(steps: Iterator[list[tuple[str, bool]]], stats: DecodeStats, console: Console) -> str:
    shown = Text()
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for step in steps:
            for piece, drafted in step:
                shown.append(piece, style="green" if drafted else "")
            live.update(Group(shown, Text(_figures(stats), style="dim")), refresh=True)
    return shown.plain


def _figures(stats: DecodeStats) -> str:
    if stats.tokens_per_step is None or not stats.decode_seconds:
        return f"[{stats.prefill_tokens} token]"
    speed = stats.step_tokens / stats.decode_seconds
    return f"[{stats.tokens_per_step:.2f} tokens per step, {speed:.1f} tokens/s, tree of {stats.last_pass_size}]"
