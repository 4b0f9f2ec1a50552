"""``medusa-train data push``: a run's self-distilled rows as a dataset on the Hugging Face Hub, in one commit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData, HfApi
from huggingface_hub.errors import RepositoryNotFoundError

import medusa_train
from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.distill import failures
from medusa_train.data.rows import SPLITS, open_rows
from medusa_train.data.statistics import RowsSummary, percentiles, summarize
from medusa_train.inference.errors import UserError
from medusa_train.publish import hub_errors, patiently
from medusa_train.recipe import SYNTHESIZE
from medusa_train.release import CARD, without_paths

FILES = {split: f"{split}.jsonl" for split in SPLITS}

_CARD = """\
---
{metadata}
---

# Self-distilled with {backbone}

{what}
Made with medusa-train {version} to train Medusa heads: small heads that draft a model's next tokens.

| | |
|---|---|
{table}
A row holds `messages`, what stands before the answer; `input_ids`, the whole text in the backbone's tokens; `spans`,
the pieces `[start, end)` of it that the backbone wrote, end tokens included; `finish_reason`, `length` where an answer
was cut. Rows are split by the hash of their prompt, so that a prompt stays where it is when others come or go.

```python
from datasets import load_dataset

rows = load_dataset("{repo_id}", split="train")
```

Licence: {licence}. The texts come from the backbone and from the prompts named above; their licences hold for them.
"""


def push(run: Path, repo_id: str, licence: str = "unknown", public: bool = False, dry_run: bool = False) -> list[str]:
    """Put the rows of a run on the Hub; the token is that of the environment, ``HF_TOKEN``.

    Args:
        run: folder of a run whose distill stage is done.
        repo_id: ``user/name``.
        licence: the Hub's word for it, such as ``apache-2.0``.
        public: whether a new repository is public.
        dry_run: say what would be there, without asking the Hub anything.

    Returns:
        What a person wants to know, a line each.

    Raises:
        UserError: there are no finished rows, the repository is public or holds something else, or the Hub refuses.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise UserError(f"repository {repo_id!r}: name it as user/repository")
    token = os.environ.get("HF_TOKEN")
    if not dry_run and not token:
        raise UserError("no token for the Hub; set HF_TOKEN to one that may write")
    stage = run.expanduser() / "distill"
    record = _read_record(stage)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_folder(folder, stage, record, repo_id, licence)
        if dry_run:
            sizes = [f"{path.stat().st_size:>14,}  {path.name}" for path in sorted(folder.iterdir())]
            told = f"{repo_id}, {'public' if public else 'private'}:"
            return [told, *sizes, "", (folder / CARD).read_text(encoding="utf-8")]
        api = HfApi(token=token, library_name="medusa-train", library_version=medusa_train.__version__)
        with hub_errors(repo_id):
            _check_repository(api, repo_id, public)
            patiently(lambda: api.create_repo(repo_id, repo_type="dataset", private=not public, exist_ok=True))
            commit = patiently(
                lambda: api.upload_folder(
                    repo_id=repo_id, repo_type="dataset", folder_path=folder, commit_message="Self-distilled rows"
                )
            )
    return [
        f"published         {api.endpoint}/datasets/{repo_id}",
        f"revision          {commit.oid}",
        f'load              load_dataset("{repo_id}", revision="{commit.oid}")',
    ]


def write_folder(folder: Path, stage: Path, record: dict[str, Any], repo_id: str, licence: str) -> None:
    """Write what is published: a file of rows per split, and the card.

    Args:
        stage: the distill stage.
        record: its ``run.json``.
    """
    rows = open_rows(stage / "rows.jsonl")
    opened = {split: (folder / name).open("w", encoding="utf-8") for split, name in FILES.items()}
    try:
        for row in rows:
            content = {name: value for name, value in asdict(row).items() if name != "split"}
            opened[row.split].write(json.dumps(content, ensure_ascii=False) + "\n")
    finally:
        for file in opened.values():
            file.close()
    for split, name in FILES.items():
        if not (folder / name).stat().st_size:
            raise UserError(f"{stage} has no row in the {split} split; run medusa-train distill again")
    (folder / CARD).write_text(_card(record, summarize(rows), stage, repo_id, licence), encoding="utf-8")


def _card(record: dict[str, Any], summary: RowsSummary, stage: Path, repo_id: str, licence: str) -> str:
    recipe = record["recipe"]
    source, data = recipe["backbone"]["source"], recipe["data"]
    template = str(load_chat_tokenizer(source, recipe["backbone"]["chat_template"]).get_chat_template())
    given = bool(data["conversations"])
    metadata = DatasetCardData(
        license=licence,
        task_categories=["text-generation"],
        tags=["medusa-train", "self-distillation", "speculative-decoding"],
        configs=[
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": name} for split, name in FILES.items()],
            }
        ],
    )
    backbone = without_paths(source)
    table = {
        "backbone": backbone,
        "chat template, SHA-256": hashlib.sha256(template.encode()).hexdigest(),
        "prompts": _prompts(data["conversations"] or data["prompts"]),
    }
    if not given:
        table |= {
            "written by": data["backend"],
            "temperatures": ", ".join(f"{value:g}" for value in data["temperatures"]),
            "max_new_tokens": data["max_new_tokens"],
            "dtype": recipe["backbone"]["dtype"],
            "quantization": recipe["backbone"]["quantization"] or "none",
            "seed": recipe["seed"],
            "prompts that failed": f"{failures(stage).total():,}",
            "prompts that could not be asked": f"{failures(stage, skipped=True).total():,}",
        }
    for split in SPLITS:
        table[f"{split} rows (learnt tokens)"] = f"{summary.rows[split]:,} ({summary.learnt[split]:,})"
    answers = percentiles(summary.answer_lengths)
    table |= {
        "answer tokens, median (longest)": f"{answers[50]:,} ({answers[100]:,})",
        "finish reasons": ", ".join(f"{name} {count:,}" for name, count in summary.finish_reasons.most_common()),
        "repeated answers": f"{summary.repeated_answers:,}",
        "looping answers": f"{summary.looping:,}",
    }
    return _CARD.format(
        metadata=metadata.to_yaml(),
        backbone=backbone,
        what="Given conversations, in its tokens." if given else "The backbone's own answers to prompts.",
        version=record["environment"]["medusa_train"],
        table="".join(f"| {name} | {value} |\n" for name, value in table.items()),
        repo_id=repo_id,
        licence=licence,
    )


def _prompts(given: str | list[dict[str, Any]]) -> str:
    names = [given] if isinstance(given, str) else [source["path"] for source in given]
    return ", ".join("written by the backbone itself" if name == SYNTHESIZE else without_paths(name) for name in names)


def _read_record(stage: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((stage / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{stage.parent} has no finished distill stage; run medusa-train distill first") from error
    return record


def _check_repository(api: HfApi, repo_id: str, public: bool) -> None:
    try:
        info = patiently(lambda: api.dataset_info(repo_id))
    except RepositoryNotFoundError:
        return
    if not info.private and not public:
        raise UserError(f"{repo_id} is public; add --public, or push to another repository")
    known = {*FILES.values(), CARD, ".gitattributes"}
    if foreign := sorted({file.rfilename for file in info.siblings or ()} - known):
        raise UserError(f"{repo_id} holds {foreign[0]}, which is not of such a dataset; push to another repository")
