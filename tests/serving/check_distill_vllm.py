"""Proof that answers distilled from a vLLM server are those that the backbone gives in this process.

In fp32 at temperature 0 both compute the same function, so rows must be equal, token for token, over both of the
server's APIs, and once more with the server's token ids left out, when its text is tokenized again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from check_vllm import load_fp32, serving

from medusa_train.data import openai_backend
from medusa_train.data.asking import Asking
from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.distill import Backend, distill, failures
from medusa_train.data.openai_backend import Servers, answer_by_servers
from medusa_train.data.rows import Prompt, Row, read_prompts, read_rows
from medusa_train.data.transformers_backend import answer_here
from medusa_train.inference.backbone import Backbone, read_limits
from medusa_train.inference.files import write_json
from medusa_train.recipe import Recipe

NAME = "distilled"


def main() -> None:
    """Distil the same prompts in every way and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run: its prompts and its backbone")
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter that has vLLM")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()

    record = json.loads((options.run / "prompts" / "run.json").read_text(encoding="utf-8"))
    source = Recipe.model_validate(record["recipe"]).backbone.source
    prompts = read_prompts(options.run / "prompts" / "prompts.jsonl")[: options.prompts]
    # The last one asks on, which works only if the earlier answer's tokens stand where they stood.
    prompts += [Prompt.of(prompts[0].messages, ["Why?"])]
    tokenizer, limits, model = load_chat_tokenizer(source), read_limits(source), load_fp32(source)
    asking = Asking(tokenizer, prompts, options.max_new_tokens, limits.max_positions, None, 0.3, 0.3)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.save_pretrained(folder / "backbone")
        tokenizer.save_pretrained(folder / "backbone")

        def rows_of(name: str, backend: Backend) -> dict[str, Row]:
            distill(asking, folder / name, backend)
            if failed := failures(folder / name):
                sys.exit(f"{name}: failed for {dict(failed)}")
            return {row.id: row for row in read_rows(folder / name / "rows.jsonl")}

        here = rows_of("here", answer_here(Backbone.wrap(model), 16, None))
        found: dict[str, dict[str, Row]] = {}
        with serving(options.vllm, folder / "backbone", NAME) as url:
            for api in ("completions", "chat"):
                found[api] = rows_of(api, answer_by_servers(Servers([url], NAME, api), limits))
            openai_backend.PLAIN_EXTRA["return_token_ids"] = False
            again = Servers([url], NAME, "completions", drop_mismatched=False)
            found["text alone"] = rows_of("text", answer_by_servers(again, limits))
    result: dict[str, Any] = {
        name: {
            "rows": len(rows),
            "equal": sum(rows[key].input_ids == here[key].input_ids for key in here),
            "marked": sum(row.mismatch is not None for row in rows.values()),
        }
        for name, rows in found.items()
    }
    if options.out:
        write_json(options.out, result)
    print(json.dumps(result, indent=2))
    different = {name: counts["rows"] - counts["equal"] for name, counts in result.items() if name != "text alone"}
    unmarked = [
        key for key, row in found["text alone"].items() if row.input_ids != here[key].input_ids and not row.mismatch
    ]
    if any(different.values()) or unmarked:
        sys.exit(f"not equal: {different}; tokenized again, different and not marked: {unmarked}")


if __name__ == "__main__":
    main()
