"""Rate of making labels: ``python benchmarks/labels.py [FILE.jsonl]``.

Prints how many conversations a second one core turns into token ids and spans, with the quickstart's tokenizer: those
of a file, or of random English-like words. Words that came before are not tokenized again, so the first time over the
conversations is told apart from later ones, which is what a long file comes close to. Both are measured with the
template as it is and with ``{% generation %}`` marks. Counted is processor time, so that a busy machine matters less.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from transformers import PreTrainedTokenizerBase

from medusa_train.cli import QUICKSTART
from medusa_train.data import encoding
from medusa_train.data.chat import encode_conversation, has_marks, load_chat_tokenizer
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


def label_rates(tokenizer: PreTrainedTokenizerBase, conversations: list[Messages]) -> tuple[float, float, float]:
    """Mean tokens of a row, and rows per second, medians: when nothing was seen before, and when everything was."""
    first, again, tokens = [], [], 0
    for _ in range(REPEATS):
        encoding._pieces.cache_clear()
        for rates in (first, again):
            start = time.process_time()
            tokens = sum(len(encode_conversation(tokenizer, messages)[0]) for messages in conversations)
            rates.append(len(conversations) / (time.process_time() - start))
    return tokens / len(conversations), sorted(first)[REPEATS // 2], sorted(again)[REPEATS // 2]


def marked(template: str) -> str:
    """The quickstart's template with its answers marked."""
    turn = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    answer = "{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    both = f"{{% if message['role'] == 'assistant' %}}{answer}{{{{ '\n' }}}}{{% else %}}{turn}{{% endif %}}"
    return template.replace(turn, both)


def main() -> None:
    if len(sys.argv) > 1:
        sets = {Path(sys.argv[1]).name: list(load_conversations([Source(sys.argv[1])]))}
    else:
        sets = {f"random, {words} words": random_conversations(1000, words) for words in (50, 150)}
    tokenizer = load_chat_tokenizer(load_recipe(QUICKSTART).backbone.source)
    templates = {"": str(tokenizer.chat_template), ", marked": marked(str(tokenizer.chat_template))}
    print("labels                                    tokens/row     rows/s: first time    later")
    for name, conversations in sets.items():
        for ending, template in templates.items():
            tokenizer.chat_template = template
            assert has_marks(tokenizer) == bool(ending)
            length, first, again = label_rates(tokenizer, conversations)
            print(f"{(name + ending)[-40:]:40}  {length:10.0f}     {first:18.0f} {again:8.0f}")


if __name__ == "__main__":
    main()
