"""The ``lossless`` command: whether heads change what their backbone writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.eval.answers import prompt_ids
from medusa_train.eval.lossless import greedy_identity, sampling_identity
from medusa_train.eval.questions import Question, load_questions, select
from medusa_train.eval.report import percent_text
from medusa_train.eval_stage import HELDOUT_TOKENS, add_to_report, answer_budget, asked, eval_questions, heads_hash
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.verify import VerifierName
from medusa_train.job import Job
from medusa_train.recipe import load_recipe

SAMPLED_PROMPTS = 4


def check_lossless(
    target: str,
    overrides: Sequence[str],
    prompts: str | None,
    num_prompts: int,
    temperature: float,
    samples: int,
    tokens: int,
    verifier: VerifierName,
    dtype: str,
) -> tuple[dict[str, Any], Path | None]:
    """Compare greedy outputs and test sampled ones.

    Args:
        target: a recipe whose run is finished, or a heads folder or repository.
        overrides: of a recipe.
        prompts: benchmark or file of the questions to heads.
        num_prompts: questions to heads; a recipe says its own.
        samples, tokens: see `sampling_identity`.
        dtype: of the backbone.

    Returns:
        The result, and the run's folder if there is one; its report shows the result.

    Raises:
        UserError: nothing to ask, or the run has no heads.
    """
    job = None
    if target.endswith((".yaml", ".yml")):
        if prompts:
            raise UserError("a recipe says what is asked; use eval.benchmark=... instead of --prompts")
        job = Job(load_recipe(target, [*overrides, f"backbone.dtype={dtype}"]))
        job.folder.result("tree")
        model, tokenizer, section = job.medusa_model(), job.tokenizer, job.recipe.eval
        questions, source, budget = eval_questions(job), asked(section), answer_budget(section)
    else:
        if overrides:
            raise UserError(f"{overrides[0]}: heads take no overrides; name a recipe")
        if not prompts:
            raise UserError("name --prompts FILE (or a benchmark) to ask these heads, or give a recipe")
        questions, source, budget = select(load_questions(prompts), num_prompts), prompts, HELDOUT_TOKENS
        model = MedusaModel.from_pretrained(target, dtype=dtype)
        tokenizer = load_chat_tokenizer(model.backbone.source)
    result = {
        "asked": source,
        "max_new_tokens": budget,
        "dtype": str(model.backbone.dtype).removeprefix("torch."),
        "tree_size": model.tree.size,
        "greedy": greedy_identity(model, tokenizer, questions, budget),
        "sampling": sampling_identity(
            model, shortest_prompts(questions, tokenizer), samples, tokens, temperature, verifier,
            job.recipe.seed if job else 0,
        ),
    }  # fmt: skip
    if job is None:
        return result, None
    add_to_report(job.folder.path, heads_hash(job.folder.heads), "lossless", result)
    return result, job.folder.path


def shortest_prompts(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The shortest questions: what is tested is verification, and a short prompt is read sooner."""
    return sorted((prompt_ids(question, tokenizer) for question in questions), key=len)[:SAMPLED_PROMPTS]


def lossless_text(result: dict[str, Any]) -> str:
    """The outcome for people."""
    greedy, sampling = result["greedy"], result["sampling"]
    lines = [
        f"temperature 0     {percent_text(greedy['identical_share'])} of {greedy['prompts']} outputs identical to "
        f"plain greedy decoding in {result['dtype']} ({greedy['tokens']} tokens, tree of {result['tree_size']})"
    ]
    lines += [
        f"                  prompt {row['prompt']} differs from token {row['index']} on; the two best logits there are "
        f"{row['top2_gap']:.2g} apart"
        for row in greedy["differences"][:5]
    ]
    lines.append(
        f"temperature {sampling['temperature']:<5g} {sampling['verdict']} ({sampling['prompts']} prompts x "
        f"{sampling['samples']} continuations of {sampling['tokens']} tokens, with drafts and without; level "
        f"{percent_text(sampling['level'])} over all tests)"
    )
    if sampling["least_p"] is not None:
        lines.append(
            f"                  least p {sampling['least_p']:.3g}, after Holm {sampling['least_adjusted_p']:.3g}"
        )
    return "\n".join(lines)
