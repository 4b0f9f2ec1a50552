"""Reports made of invented answers, through the code that makes real ones."""

from medusa_train.eval.answers import PARTS, Answer, Turn
from medusa_train.eval.evaluate import DEFINITIONS
from medusa_train.eval.figures import (
    acceptance,
    batch_speed_row,
    categories,
    part_shares,
    speed_row,
    speedup,
    step_model,
    warnings,
)
from medusa_train.eval.questions import Question
from medusa_train.eval.report import SCHEMA

PATHS = [[0], [1], [0, 0], [0, 1], [1, 0]]


def turn(histogram, step_ms, prefill_ms=50.0, first=1):
    """A turn whose steps emitted what the histogram says, each taking so many milliseconds."""
    steps = sum(histogram.values())
    seconds = steps * step_ms / 1000
    tokens = first + sum(size * count for size, count in histogram.items())
    blocks = [[first, 0]] + [[size, size - 1] for size, count in histogram.items() for _ in range(count)]
    shares = dict(zip(PARTS, (0.1, 0.8, 0.06, 0.04), strict=True))
    return Turn(
        tokens, first, prefill_ms / 1000, seconds, "", [1, 2, 3], list(range(tokens)), dict(histogram), blocks,
        {part: seconds * share for part, share in shares.items()},
    )  # fmt: skip


def answers(arm, histograms, step_ms, repeats=(1.0, 1.0, 1.0), ids=None):
    """Answers of one turn by repeat and question; ``repeats`` scale the times."""
    ids = ids or [str(n) for n in range(len(histograms))]
    return [
        [Answer("key", ids[n], arm, r, [turn(histogram, step_ms * scale)]) for n, histogram in enumerate(histograms)]
        for r, scale in enumerate(repeats)
    ]


def synthetic_report(repeats=(1.0, 1.02, 0.98)):
    """12 prompts of three categories: 20 plain steps of 40 ms, or 12 of 50 ms with the tree.

    Four prompts together: plain steps of 60 ms, of 100 ms with the tree, for all four.
    """
    kinds = ["qa"] * 6 + ["writing"] * 5 + ["math"]
    questions = [Question([{"role": "user", "content": f"question {n}"}], category=k) for n, k in enumerate(kinds)]
    ids = [question.id for question in questions]
    given = {
        "generate": answers("generate", [{1: 20}] * 12, 42, repeats, ids),
        "plain": answers("plain", [{1: 20}] * 12, 40, repeats, ids),
        "medusa": answers("medusa", [{1: 6, 2: 4, 3: 2}] * 12, 50, repeats, ids),
    }
    bases = {"generate": given["generate"], "plain": given["plain"]}
    medusa = given["medusa"]
    together = {
        "plain": answers("plain", [{1: 20}] * 12, 60 / 4, repeats, ids),
        "medusa": answers("medusa", [{1: 6, 2: 4, 3: 2}] * 12, 100 / 4, repeats, ids),
    }
    accepted = acceptance(medusa[0], 2, len(PATHS) + 1)
    environment = {"torch": "2.13", "processor": "A Processor", "threads": 2, "accelerator": None}
    sizes = [
        {"batch_size": rows, "size": size, "expected_tokens_per_step": tokens, "step_ms": ms, "measured_step_ms": ms,
         "expected_tokens_per_second": rows * 1000 * tokens / ms, "chosen": size == (6 if rows == 1 else 1)}
        for rows, slower in ((1, 0.0), (4, 8.0))
        for size, tokens, ms in (
            (size, tokens, ms + slower * size)
            for size, tokens, ms in ((1, 1.0, 40.0), (4, 1.5, 46.0), (6, 1.7, 50.0), (16, 1.9, 70.0))
        )
    ]  # fmt: skip
    gains = [[path, 0.5 / (1 + sum(path)) / len(path)] for path in PATHS]
    stages = ("prompts", "distill", "cache", "train", "tree")
    made = {
        stage: {"result": {"rows": 10}, "wall_seconds": 1.0, "environment": environment, "recipe": {"seed": 0}}
        for stage in stages
    }
    made["tree"]["result"] = {
        "chosen_size": 6,
        "sizes": sizes,
        "gains": gains,
        "chosen_because": "at batch size 1, the fastest of 4 sizes, 34.0 expected tokens/s a row",
        "given": False,
        "best_sizes": [
            {"batch_size": 1, "size": 6, "reason": "the fastest"},
            {"batch_size": 4, "size": 1, "reason": "the fastest"},
        ],
    }
    report = {
        "schema": SCHEMA,
        "definitions": DEFINITIONS,
        "verifier": "greedy: exact, the output is that of plain greedy decoding",
        "setting": {
            "backbone": "some/model", "dtype": "float32", "device": "cpu", "batch_size": 1, "temperature": 0,
            "asked": "synthetic", "prompts": 12, "timed_prompts": 12, "left_out": 0, "turns": 12,
            "prompt_tokens": [3] * 12, "max_new_tokens": 21, "repeats": len(repeats), "compiled": False,
            "kind": "medusa", "num_heads": 2, "num_layers": 1, "draft_vocab_size": 4096,
            "reads_copies": False,
            "tree_size": 6, "tree_paths": PATHS, "batch_trees": {"4": []},
            "pass_bytes": {"backbone": 400_000_000, "heads": 20_000_000},
        },
        "acceptance": accepted,
        "simulated": {"tokens_per_step": 1.68, "difference": 0.008, "recall": {}},
        "replay": {"tokens_per_step": 1.6, "steps": 900, "answers": 30},
        "recall": {"top1": [0.5, 0.3], "top5": [0.7, 0.5], "top10": [0.8, 0.6]},
        "trees": [
            {"tree": "chosen", "size": 6, "expected_tokens_per_step": 1.7, "step_ms": 50.0, "replayed": 1.65},
            {"tree": "independence-greedy, 64 tokens", "size": 64, "expected_tokens_per_step": 2.1, "step_ms": None,
             "replayed": 2.0},
        ],
        "speed": {arm: speed_row(found, bases) | {"identical_to_plain": 1.0} for arm, found in given.items()},
        "batches": [
            {
                "batch_size": 4, "prompts": 12, "tree_size": 1,
                "arms": {
                    arm: batch_speed_row(found, {"generate": None, "plain": together["plain"]})
                    | {"identical_to_plain": 1.0}
                    for arm, found in together.items()
                },
            },
        ],
        "unavailable": {"openai": "server http://localhost:1 cannot be reached"},
        "speedup": {f"over_{name}": speedup(base, medusa) for name, base in bases.items()},
        "overhead": 1.25,
        "model": step_model(accepted["tokens_per_step"], 1.25, speedup(given["plain"], medusa)["median"]),
        "step_time_shares": part_shares(medusa),
        "losslessness": {f"over_{name}": {"identical_share": 1.0, "differences": []} for name in bases},
        "read_again": {"prompts": 12, "share": 1.0, "differences": []},
        "categories": categories(questions, given, {"medusa": medusa[0]}),
        "sample": {
            "prompt": "question 1", "tokens_per_step": 1.67,
            "pieces": [{"text": text, "step": 0, "drafted": text == "sample"} for text in ("a", "sample", "<b>")],
        },
        "evaluation": {"decoding_seconds": 100.0, "wall_seconds": 105.0},
        "made": made,
        "environment": environment,
        "peak_memory_gb": 2.5,
    }  # fmt: skip
    return report | {"warnings": warnings(report)}
