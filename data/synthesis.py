"""Prompts that the backbone writes itself.

A chat model asked to continue right behind the template's opening of a user turn writes what users wrote in its
training data. That needs no prompt file, and the prompts come from the model's own distribution.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import user_turn_opening
from medusa_train.data.generation import generate_batch
from medusa_train.data.prompts import normalized, prompt_key
from medusa_train.data.rows import Prompt, append_jsonl, drop_torn_tail, read_prompts
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError

MIN_WORDS = 4
MAX_BATCHES_PER_PROMPT = 4  # a model that mostly writes fragments or repeats itself is given up on
NEAR = 0.8  # share of common shingles from which a prompt repeats another
SHINGLE = 5  # characters
_UNFINISHED = re.compile(r"([,;:(\[{\-–—]|\b(and|or|the|a|an|of|to|with|for|in))$", re.IGNORECASE)
_BANDS, _WIDTH = 16, 4  # texts with 0.8 of their shingles in common share a band of hashes with odds of 1 to 5,000
_TOPIC = "You are a helpful assistant. The user asks about this: {topic}"


def synthesize_prompts(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    count: int,
    max_tokens: int,
    temperature: float,
    top_k: int,
    batch_size: int,
    seed: int,
    topics: Sequence[str] = (),
    taken: Container[int] = frozenset(),
) -> None:
    """Let the backbone write user turns into ``path`` until it holds ``count``; continues what is there.

    Kept are turns that the model ended itself, that are no fragments (`is_whole`) and that repeat no earlier one
    (`Seen`). Batch b is drawn with a seed of its own, so a resumed run writes what an unbroken one would.

    Args:
        topics: what the turns are about, in rotation; the model is told in a system prompt that is not kept.
        taken: `prompt_key` of prompts from elsewhere, which are not written again.

    Raises:
        UserError: the model does not write enough usable prompts.
    """
    drop_torn_tail(path)
    openings = [user_turn_opening(tokenizer, _TOPIC.format(topic=topic)) for topic in topics]
    openings = openings or [user_turn_opening(tokenizer)]
    seen = Seen()
    kept = sum(seen.add(normalized(prompt)) for prompt in read_prompts(path))
    stops = sorted({openings[0][1], *backbone.eos_token_ids})
    with tqdm(total=count, initial=kept, desc="prompts", unit="prompt") as bar:
        batch = kept // batch_size
        last = batch + MAX_BATCHES_PER_PROMPT * (count // batch_size + 2)
        while kept < count:
            if batch == last:
                raise UserError(
                    f"the backbone wrote only {kept} usable prompts of the {count} wanted; "
                    "lower data.num_prompts or name a prompt file in data.prompts"
                )
            starts = [openings[(batch * batch_size + row) % len(openings)][0] for row in range(batch_size)]
            turns = generate_batch(backbone, starts, max_tokens, stops, temperature, top_k, seed=seed * 100_003 + batch)
            fresh: list[Prompt] = []
            for ids in turns:
                if ids[-1] not in stops:
                    continue  # a fragment: it never ended its turn
                text = tokenizer.decode(ids[:-1], skip_special_tokens=True).strip()
                prompt = Prompt.of([{"role": "user", "content": text}])
                if kept + len(fresh) == count or not is_whole(text) or prompt_key(prompt) in taken:
                    continue
                if seen.add(normalized(prompt)):
                    fresh.append(prompt)
            append_jsonl(path, fresh)
            kept += len(fresh)
            bar.update(len(fresh))
            batch += 1


def is_whole(text: str) -> bool:
    """Whether a turn has at least `MIN_WORDS` words and does not break off in the middle of a sentence."""
    return len(text.split()) >= MIN_WORDS and not _UNFINISHED.search(text)


class Seen:
    """Texts so far, to find those that nearly repeat one: MinHash (Broder 1997) proposes, shingles decide."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self._factors = draw.integers(1, 2**62, _BANDS * _WIDTH, dtype=np.uint64) * 2 + 1
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]
        self._shingles: list[NDArray[np.uint64]] = []

    def add(self, text: str) -> bool:
        """Note a text; False, and it is not noted, if it shares `NEAR` of its shingles with an earlier one."""
        shingles = _shingles(text)
        mixed = shingles[:, None] * self._factors  # modulo 2^64; (shingles, hashes)
        lowest = (mixed ^ (mixed >> np.uint64(31))).min(axis=0).reshape(_BANDS, _WIDTH)
        keys = [band.tobytes() for band in lowest]
        near = {number for band, key in zip(self._bands, keys, strict=True) for number in band.get(key, ())}
        for number in near:
            common = len(np.intersect1d(shingles, self._shingles[number], assume_unique=True))
            if common >= NEAR * (len(shingles) + len(self._shingles[number]) - common):
                return False
        for band, key in zip(self._bands, keys, strict=True):
            band.setdefault(key, []).append(len(self._shingles))
        self._shingles.append(shingles)
        return True


def _shingles(text: str) -> NDArray[np.uint64]:
    """Hashes of all runs of `SHINGLE` bytes, each once; the same on every machine."""
    content = np.frombuffer(text.encode().ljust(SHINGLE), np.uint8).astype(np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(content, SHINGLE)
    powers = np.uint64(257) ** np.arange(SHINGLE, dtype=np.uint64)
    return np.unique((windows * powers).sum(axis=1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
