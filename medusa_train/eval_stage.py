"""The eval stage: what was trained, measured on this device, and what is added to its report afterwards."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from medusa_train.eval.answers import AnswerFile, answers_key
from medusa_train.eval.evaluate import Plan, evaluate
from medusa_train.eval.questions import Question, load_benchmark, load_questions, select
from medusa_train.eval.report import read_report, write_report
from medusa_train.eval.server import Server
from medusa_train.eval.step_curve import timed_step_ms
from medusa_train.inference.backbone import Backbone, load_backbone
from medusa_train.inference.checkpoint import ADAPTER
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_json
from medusa_train.inference.model import MedusaModel
from medusa_train.job import Job
from medusa_train.model_card import write_model_card
from medusa_train.recipe import EvalSection
from medusa_train.run_folder import environment, file_hash, peak_memory_gb

HELDOUT_TOKENS = 128  # budget of an answer to a held-out prompt
EXTRAS = ("lossless", "cost")  # sections that other commands add to a report, kept in files of these names


def run_eval(job: Job) -> dict[str, Any]:
    """Measure on held-out prompts or a benchmark; write the report and the model card.

    Answers are kept in ``answers.jsonl`` one by one, so that an evaluation that was killed goes on.
    """
    section, folder = job.recipe.eval, job.folder
    stage = folder.begin("eval")
    made = {name: folder.result(name) for name in ("prompts", "distill", "cache", "train", "tree")}
    model = job.medusa_model()
    plan = Plan(
        questions=eval_questions(job),
        asked=asked(section),
        arms=section.arms,
        max_new_tokens=answer_budget(section),
        repeats=section.repeats,
        timed=section.timed_questions,
        load_draft_model=partial(_load_draft_model, job),
        server=_server(section),
        batch_sizes=section.batch_sizes,
        step_seconds={size: ms / 1000 for size, ms in timed_step_ms(made["tree"]["result"]["sizes"], 1).items()},
        compared=made["tree"]["result"]["compared"],
    )
    kept = AnswerFile(stage / "answers.jsonl", key_of(job, model, plan))
    report = evaluate(model, job.tokenizer, job.measured("heldout"), plan, kept)
    report |= {"made": made, "environment": environment(), "peak_memory_gb": peak_memory_gb()}
    report |= extras_of(folder.path, heads_hash(folder.heads))
    write_report(folder.path, report)
    write_model_card(folder.heads, report)
    for warning in report["warnings"]:
        tqdm.write(f"eval: {warning}")
    took = report["evaluation"]
    return {
        "report": str(folder.path / "report.html"),
        "seconds_of_decoding": took["decoding_seconds"],
        "seconds_of_all": took["wall_seconds"],
    }


def eval_questions(job: Job) -> list[Question]:
    """What the recipe asks."""
    section = job.recipe.eval
    if section.benchmark:
        questions = load_questions(section.benchmark, section.benchmark_file)
        return select(questions, section.num_prompts, section.samples_per_category)
    return [
        Question(row.messages, input_ids=tuple(row.input_ids[: row.spans[0][0]]))
        for row in job.rows("heldout")[: section.num_prompts]
    ]


def asked(section: EvalSection) -> str:
    """The source of the questions, for people."""
    if section.benchmark is None:
        return "held-out prompts of the run"
    benchmark = load_benchmark(section.benchmark)
    return f"{benchmark.name}, version {benchmark.version}" if benchmark else Path(section.benchmark).name


def answer_budget(section: EvalSection) -> int:
    """The longest answer, in tokens."""
    benchmark = load_benchmark(section.benchmark) if section.benchmark else None
    return section.max_new_tokens or (benchmark.max_new_tokens if benchmark else HELDOUT_TOKENS)


def heads_hash(heads: Path) -> str:
    """Hash of all in a heads folder that decoding depends on."""
    names = ("medusa_lm_head.safetensors", "tree.json", ADAPTER)
    hashes = [file_hash(heads / name) for name in names if (heads / name).exists()]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def add_to_report(folder: Path, heads: str, section: str, content: dict[str, Any]) -> None:
    """Keep one of ``EXTRAS`` in the run's folder, and show it in its report if there is one.

    Args:
        heads: the `heads_hash` that the content is about; a report of other heads will not show it.
    """
    write_json(folder / f"{section}.json", {"heads": heads, section: content})
    if (folder / "report.json").exists():
        try:
            report = read_report(folder)
        except UserError as error:
            tqdm.write(f"{section}: kept in {folder / section}.json, but no report shows it: {error}")
        else:
            write_report(folder, report | {section: content})


def extras_of(folder: Path, heads: str) -> dict[str, Any]:
    """What `add_to_report` kept in a run's folder about these heads, by section."""
    found = {}
    for section in EXTRAS:
        path = folder / f"{section}.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if record.get("heads") == heads:
            found[section] = record[section]
    return found


def _load_draft_model(job: Job) -> Backbone | None:
    source, backbone = job.recipe.eval.draft_model, job.recipe.backbone
    return load_backbone(source, backbone.dtype, backbone.device) if source else None


def _server(section: EvalSection) -> Server | None:
    if section.server_url and section.server_model:
        return Server(section.server_url, section.server_model)
    return None


def key_of(job: Job, model: MedusaModel, plan: Plan) -> str:
    """The `answers_key` of an evaluation."""
    return answers_key(
        heads_hash(job.folder.heads),
        [question.id for question in plan.questions],
        job.recipe.backbone.model_dump(),
        job.recipe.inference.compile,
        job.recipe.eval.model_dump(),
        str(model.backbone.device),
        environment(),
    )
