"""Rate of making labels: ``python benchmarks/labels.py [FILE.jsonl]``.

Prints how many conversations a second one core turns into token ids and spans, with the quickstart's tokenizer: those
of a file, or of random English-like words. Counted is processor time, so that a busy machine matters less.
"""

from __future__ import annotations

import os
import random
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from medusa_train.cli import QUICKSTART
from medusa_train.data.chat import encode_conversation, load_chat_tokenizer
from medusa_train.data.prompts import load_conversations
from medusa_train.data.records import Messages
from medusa_train.data.sources import Source
from medusa_train.recipe import load_recipe

REPEATS = 5
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "his", "they")


def random_conversations(count: int, words: int) -> list[Messages]:
    draw = random.Random(0)

    def text(share: float) -> str:
        return " ".join(draw.choices(WORDS, k=int(share * words)))

    return [[{"role": "user", "content": text(0.3)}, {"role": "assistant", "content": text(0.7)}] for _ in range(count)]


def label_rates(conversations: list[Messages]) -> tuple[float, list[float]]:
    """Mean tokens of a row, and rows per second of every repeat."""
    tokenizer = load_chat_tokenizer(load_recipe(QUICKSTART).backbone.source)
    rates, tokens = [], 0
    for _ in range(REPEATS):
        start = time.process_time()
        tokens = sum(len(encode_conversation(tokenizer, messages)[0]) for messages in conversations)
        rates.append(len(conversations) / (time.process_time() - start))
    return tokens / len(conversations), rates


def main() -> None:
    if len(sys.argv) > 1:
        sets = {sys.argv[1]: list(load_conversations([Source(sys.argv[1])]))}
    else:
        sets = {f"random, {words} words": random_conversations(1000, words) for words in (50, 150)}
    print("labels                                    tokens/row     rows/s: median (best)")
    for name, conversations in sets.items():
        length, rates = label_rates(conversations)
        print(f"{name[-40:]:40}  {length:10.0f}     {sorted(rates)[REPEATS // 2]:8.0f} ({max(rates):.0f})")


if __name__ == "__main__":
    main()
