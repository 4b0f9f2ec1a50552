"""What an evaluation depends on, and what other commands add to its report."""

from types import SimpleNamespace

import pytest

from medusa_train import lossless
from medusa_train.eval.questions import Question, load_benchmark
from medusa_train.eval_stage import HELDOUT_TOKENS, add_to_report, answer_budget, extras_of, heads_hash, key_of
from medusa_train.lossless import SAMPLED_PROMPTS, check_lossless, shortest_prompts
from medusa_train.recipe import EvalSection, Recipe


@pytest.fixture
def heads(tmp_path):
    for name in ("medusa_lm_head.safetensors", "tree.json", "README.md"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_heads_are_their_weights_and_their_tree(heads):
    before = heads_hash(heads)
    (heads / "README.md").write_text("a card that eval itself writes")
    assert heads_hash(heads) == before
    for name in ("medusa_lm_head.safetensors", "tree.json"):
        (heads / name).write_text("others")
        assert heads_hash(heads) != before, name
        (heads / name).write_text(name)


def recipe(**sections):
    return Recipe(output_dir="out", backbone={"source": "m"} | sections.pop("backbone", {}), **sections)


def test_answers_are_kept_for_the_same_heads_questions_and_settings_alone(heads):
    asked = [Question([{"role": "user", "content": "one"}])]

    def key(questions=asked, device="cpu", **sections):
        job = SimpleNamespace(recipe=recipe(**sections), folder=SimpleNamespace(heads=heads))
        model = SimpleNamespace(backbone=SimpleNamespace(device=device))
        return key_of(job, model, SimpleNamespace(questions=questions))

    keys = [
        key(), key(questions=asked * 2), key(device="cuda"), key(backbone={"dtype": "float16"}),
        key(inference={"compile": True}), key(eval={"repeats": 9}),
    ]  # fmt: skip
    (heads / "tree.json").write_text("another tree")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == key(training={"num_train_epochs": 9}), "what made the heads is in the heads"


def test_the_recipes_budget_goes_before_the_benchmarks():
    assert answer_budget(EvalSection(benchmark="gsm8k", max_new_tokens=7)) == 7
    assert answer_budget(EvalSection(benchmark="gsm8k")) == load_benchmark("gsm8k").max_new_tokens
    assert answer_budget(EvalSection()) == HELDOUT_TOKENS


def test_what_was_found_about_other_heads_is_not_shown(tmp_path):
    add_to_report(tmp_path, "these", "cost", {"rows": []})
    add_to_report(tmp_path, "those", "lossless", {"dtype": "float32"})
    assert extras_of(tmp_path, "these") == {"cost": {"rows": []}}
    assert extras_of(tmp_path, "those") == {"lossless": {"dtype": "float32"}}


def test_the_shortest_prompts_are_sampled():
    asked = [Question([], input_ids=tuple(range(length))) for length in (9, 2, 7, 3, 8, 1)]
    assert [len(prompt) for prompt in shortest_prompts(asked, None)] == [1, 2, 3, 7][:SAMPLED_PROMPTS]


def test_losslessness_is_tested_in_the_dtype_that_was_asked_for_with_the_recipes_seed(monkeypatch, heads):
    model = SimpleNamespace(backbone=SimpleNamespace(dtype="torch.float32"), tree=SimpleNamespace(size=4))
    seen = {}

    def load_recipe(target, overrides):
        seen["overrides"] = overrides
        return recipe(seed=5)

    folder = SimpleNamespace(result=lambda stage: {}, path=heads, heads=heads)
    job = {"medusa_model": lambda: model, "tokenizer": None, "folder": folder}
    monkeypatch.setattr(lossless, "load_recipe", load_recipe)
    monkeypatch.setattr(lossless, "Job", lambda recipe: SimpleNamespace(recipe=recipe, **job))
    monkeypatch.setattr(lossless, "eval_questions", lambda job: [])
    monkeypatch.setattr(lossless, "greedy_identity", lambda *settings: {"budget": settings[3]})
    monkeypatch.setattr(lossless, "sampling_identity", lambda *settings: {"settings": settings[2:]})
    result, _ = check_lossless("r.yaml", ["seed=5"], None, 8, 0.7, 32, 6, "rejection", "float32")
    assert seen["overrides"] == ["seed=5", "backbone.dtype=float32"]
    assert result["greedy"]["budget"] == HELDOUT_TOKENS
    assert result["sampling"]["settings"] == (32, 6, 0.7, "rejection", 5)
