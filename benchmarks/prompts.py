"""Memory of large prompt files: ``python benchmarks/prompts.py [ROWS]``, a million unless given.

Writes a file of so many prompts of some 60 words to a temporary folder, lets ``medusa-train prompts`` take all of them
and a sample, and then orders and splits those as distillation begins. Every step is a process of its own, whose peak
resident memory and time are printed; the first line is one that takes a single prompt.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from medusa_train.cli import QUICKSTART
from medusa_train.data.asking import Asking
from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.rows import open_prompts
from medusa_train.recipe import load_recipe

WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "his", "they")


def write_file(path: Path, rows: int) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            text = f"{number} " + " ".join(draw.choices(WORDS, k=60))
            file.write(json.dumps({"id": number, "prompt": text, "category": "none"}) + "\n")


def measure(name: str, *command: object) -> None:
    """Run a command and print what it took."""
    start = time.time()
    with subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{name}: failed with {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    print(f"{name:24}  {usage.ru_maxrss * unit / 1e9:8.2f} GB  {time.time() - start:6.0f} s", flush=True)


def split(path: Path) -> None:
    """What distillation does before it asks: prompts in their order, and each one's split."""
    tokenizer, data = load_chat_tokenizer(load_recipe(QUICKSTART).backbone.source), load_recipe(QUICKSTART).data
    asking = Asking(tokenizer, open_prompts(path), 512, None, None, data.calibration_share, data.heldout_share)
    order = asking.order(asking.ids())
    print(len(order), asking.question(asking.prompts[int(order[0])]))


def main() -> None:
    if sys.argv[1:2] == ["--split"]:
        split(Path(sys.argv[2]))
        return
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_file(folder / "large.jsonl", rows)
        (folder / "one.jsonl").write_text('{"prompt": "what is this?"}\n')
        print(f"{rows:,} prompts, {(folder / 'large.jsonl').stat().st_size / 1e6:,.0f} MB\nstep  peak memory  time")

        def prompts(name: str, file: str, count: str) -> None:
            words = [f"data.prompts={folder / file}", f"data.num_prompts={count}", "--out", folder / name]
            measure(name, "-m", "medusa_train.cli", "prompts", QUICKSTART, *words)

        prompts("one prompt", "one.jsonl", "null")
        prompts("all", "large.jsonl", "null")
        prompts("a tenth", "large.jsonl", str(rows // 10))
        measure("order and split", __file__, "--split", folder / "all" / "prompts" / "prompts.jsonl")


if __name__ == "__main__":
    main()
