"""Proof that a vLLM server with exported heads is measured as an arm of an evaluation, its counters beside ours.

The heads draft a chain in both engines, in fp32 at temperature 0, so the server's tokens per step must be those of our
own decoding up to what each answer's first and last steps count, and its texts those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from check_vllm import load_fp32, serving

from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.hidden_states import read_cache
from medusa_train.data.rows import read_rows
from medusa_train.eval.answers import AnswerFile
from medusa_train.eval.evaluate import Plan, evaluate
from medusa_train.eval.questions import Question
from medusa_train.eval.server import Server
from medusa_train.formats import export_heads
from medusa_train.inference import MedusaModel, Tree
from medusa_train.inference.checkpoint import load_heads
from medusa_train.inference.files import write_json

NAME = "served"
GAP = 0.05  # between the engines' tokens per step: a server counts drafts beyond an answer's end, and those of prefill


def main() -> None:
    """Evaluate plain decoding, our heads and the server on held-out prompts of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run: its heads, and prompts from its rows")
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter that has vLLM")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()

    checkpoint = load_heads(options.run / "heads")
    source = checkpoint.backbone_source
    tokenizer, backbone = load_chat_tokenizer(source), load_fp32(source)
    rows = [row for row in read_rows(options.run / "distill" / "rows.jsonl") if row.split == "heldout"]
    questions = [Question(row.messages[:1]) for row in rows[: options.prompts]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        backbone.save_pretrained(folder / "backbone")
        tokenizer.save_pretrained(folder / "backbone")
        export_heads(options.run / "heads", folder / "heads", "vllm", pad_vocabulary=True)
        depth = checkpoint.heads.config.num_heads
        model = MedusaModel.from_pretrained(options.run / "heads", backbone)
        model.tree = Tree.chain(depth)
        speculation = {"method": "medusa", "model": str(folder / "heads"), "num_speculative_tokens": depth}
        with serving(options.vllm, folder / "backbone", NAME, speculation) as url:
            plan = Plan(
                questions, "held-out prompts", ("plain", "medusa", "openai"), options.max_new_tokens, 1, None, (1,),
                lambda: None, Server(url, NAME), {}, [],
            )  # fmt: skip
            kept = AnswerFile(folder / "answers.jsonl", "")
            report = evaluate(model, tokenizer, read_cache(options.run / "cache" / "heldout"), plan, kept)
        texts: dict[str, dict[str, str]] = {}
        for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)
            texts.setdefault(answer["arm"], {})[answer["question"]] = answer["turns"][0]["text"]
    if report["unavailable"]:
        sys.exit(f"the server did not run: {report['unavailable']}")
    served, ours = (report["speed"][arm]["tokens_per_step"] for arm in ("openai", "medusa"))
    result: dict[str, Any] = {
        "prompts": len(questions),
        "tokens_per_step": {"ours": ours, "server": served},
        "tokens_per_second": {arm: row["decode_tokens_per_second"]["median"] for arm, row in report["speed"].items()},
        "equal_texts": sum(texts["openai"][key] == text for key, text in texts["plain"].items()),
    }
    if options.out:
        write_json(options.out, result)
    print(json.dumps(result, indent=2))
    if abs(served / ours - 1) > GAP or result["equal_texts"] < len(questions):
        sys.exit("the server's counters or texts are not those of our own decoding")


if __name__ == "__main__":
    main()
