"""Talking to a model with heads in a terminal, tokens shown as they come."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from tokenizers.decoders import DecodeStream

from medusa_train.data.chat import Message, load_chat_tokenizer, render_prompt
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.stats import DecodeStats

_GREEN, _PLAIN = "\033[32m", "\033[0m"


class Chat:
    """Heads, their backbone and its tokenizer."""

    def __init__(self, heads: str, backbone: str | None = None) -> None:
        self.model = MedusaModel.from_pretrained(heads, backbone)
        self.tokenizer = load_chat_tokenizer(self.model.backbone.source)

    def answer(
        self, messages: Sequence[Message], max_new_tokens: int, temperature: float, seed: int, color: bool
    ) -> str:
        """Stream the answer to standard output, then one line of figures to standard error; returns the text.

        With ``color``, tokens that the heads drafted are green: they came without a backbone pass of their own.
        """
        prompt = torch.tensor(render_prompt(self.tokenizer, messages))
        stats, stream, text = DecodeStats(), DecodeStream(skip_special_tokens=True), ""
        generator = torch.Generator(self.model.backbone.device).manual_seed(seed)
        blocks = self.model.stream(prompt, max_new_tokens, temperature=temperature, generator=generator, stats=stats)
        for block in blocks:
            for place, token in enumerate(block.tokens):
                piece = stream.step(self.tokenizer.backend_tokenizer, token) or ""
                text += piece
                sys.stdout.write(f"{_GREEN}{piece}{_PLAIN}" if color and place < block.drafted else piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        if stats.tokens_per_step is not None:
            speed = stats.step_tokens / stats.decode_seconds
            sys.stderr.write(f"[{stats.tokens_per_step:.2f} tokens per step, {speed:.1f} tokens/s]\n")
        return text
