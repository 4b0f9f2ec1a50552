"""`medusa-train bench`: ways of decoding a file of prompts, compared on heads that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.eval.answers import AnswerFile, answers_key
from medusa_train.eval.arms import NEED_CALIBRATION
from medusa_train.eval.bench import bench, check_prompts_file, choose_arms
from medusa_train.eval.bench_table import bench_table
from medusa_train.eval.questions import load_questions
from medusa_train.eval_stage import heads_hash
from medusa_train.inference.backbone import load_backbone
from medusa_train.inference.checkpoint import TREE, WEIGHTS, local_folder
from medusa_train.inference.model import MedusaModel
from medusa_train.run_folder import environment


def bench_heads(
    heads: str,
    backbone: str | None,
    draft_model: str | None,
    prompt_file: Path,
    num_prompts: int | None,
    max_new_tokens: int,
    repeats: int,
    batch_sizes: list[int],
    arms: str | None,
    dtype: str,
    kept: Path | None,
) -> tuple[dict[str, Any], str]:
    """What was measured, and as a table; mistakes are found before a model is loaded where they can be.

    Args:
        heads: folder, or repository on the Hub.
        backbone: another source than the heads' config names.
        arms: names with commas between them; None: all that can run.
        kept: file of answers, for as long as the comparison is not finished.

    Raises:
        UserError: an argument cannot be had, or nothing can be measured (see `bench`).
    """
    names = choose_arms(arms, draft_model is not None, batch_sizes)
    check_prompts_file(prompt_file)
    model = MedusaModel.from_pretrained(heads, backbone, dtype)
    if arms is None and model.calibration is None:
        # Asked for by name, they say what is missing.
        names = [name for name in names if name not in NEED_CALIBRATION]
    tokenizer, questions = load_chat_tokenizer(model.backbone.source), load_questions(str(prompt_file))[:num_prompts]
    small = load_backbone(draft_model, dtype) if draft_model else None
    key = answers_key(
        heads_hash(local_folder(heads, [WEIGHTS, TREE])), model.backbone.source, str(model.backbone.dtype),
        str(model.backbone.device), draft_model, max_new_tokens, environment(),
    )  # fmt: skip
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
    result = bench(
        model, tokenizer, questions, small, names, batch_sizes, max_new_tokens, repeats, AnswerFile(kept, key)
    )
    return result, bench_table(result)
