"""The bench command on tiny models: every figure is there and adds up; no time is judged."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import assert_refused, random_heads
from medusa_train.eval.answers import Answer, Turn, local_ask
from medusa_train.eval.arms import ARMS, BATCH_OF_ONE, DRAFTERS
from medusa_train.eval.bench import by_category, check_prompts, choose_arms, outside_forward, parse_batch_sizes, passes
from medusa_train.eval.questions import Question, load_questions
from medusa_train.eval.simulate import (
    TREE_SIZES,
    accepted_deck,
    likely_tree,
    parse_histogram,
    part_seconds,
)
from medusa_train.inference import MedusaModel, NoDrafter, Tree, UserError, load_backbone
from medusa_train.inference.adaptive import Calibration
from medusa_train.inference.checkpoint import save_heads, save_tree
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.stopping import Stopping
from medusa_train.inference.verify import verify_greedy

PATHS = [[0], [1], [0, 0], [0, 0, 0]]
RECORDS = [
    {"question_id": 1, "category": "qa", "turns": ["what is this ?", "and that ?"]},
    {"question_id": 2, "category": "qa", "turns": ["the cat sat on the mat and the cat sat on the mat"]},
    {"question_id": 3, "category": "writing", "turns": ["and what is the cat ?"]},
    {"question_id": 4, "category": "writing", "turns": ["mat"]},
    {"question_id": 5, "category": "writing", "turns": ["is this the mat ?"]},
]


@pytest.fixture
def files(tmp_path, tiny_chat_folder):
    """A heads folder with calibration, and Spec-Bench's kind of prompts."""
    backbone = load_backbone(str(tiny_chat_folder), "float32", "cpu")
    tree = Tree.from_paths(PATHS)
    save_heads(tmp_path / "heads", random_heads(vocab_size=512), backbone, tree)
    save_tree(
        tmp_path / "heads",
        tree,
        Calibration(tree.paths[1:], (1.0, 1.0, 1.0), {1: {1: 1.0, 2: 1.01, 4: 1.05}}, {1: 0.0}),
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return tmp_path


@pytest.fixture
def command(command):
    return partial(command, "bench")


def test_every_arm_and_batch_is_measured_and_adds_up(command, files, tiny_chat_folder):
    out = files / "new" / "bench.json"
    code, shown, error = command(
        files / "heads", "--draft-model", tiny_chat_folder, "--prompts", files / "prompts.jsonl", "--dtype", "float32",
        "--max-new-tokens", 10, "--repeats", 2, "--batch-sizes", "1,2", "--out", out,
    )  # fmt: skip
    assert code == 0, error
    result = json.loads(out.read_text())
    rows = {(row["arm"], row["batch_size"]): row for row in result["rows"]}
    assert rows.keys() == {(arm, size) for arm in ARMS for size in (1, 2) if size == 1 or arm not in BATCH_OF_ONE}
    for (arm, size), row in rows.items():
        assert row["prompts"] == (5 if size == 1 else 4)
        assert len(row["repeats"]) == 2
        assert row["identical_to_plain"] == 1, arm
        assert row["differences"] == []
        speeds = [repeat["step_tokens"] / repeat["decode_seconds"] for repeat in row["repeats"]]
        assert row["tokens_per_second"]["minimum"] == pytest.approx(min(speeds))
        base = [repeat["tokens_per_second"] for repeat in rows["plain", size]["repeats"]]
        ratios = [ours / plain for ours, plain in zip(speeds, base, strict=True)]
        assert row["over_plain"]["maximum"] == pytest.approx(max(ratios))
        assert (row["outside_forward"] is None) == (arm not in DRAFTERS)
        per_pass = [1000 * repeat["decode_seconds"] / repeat["passes"] for repeat in row["repeats"]]
        assert row["ms_per_pass"]["maximum"] == pytest.approx(max(per_pass))
        for repeat in row["repeats"]:
            assert repeat["tokens"] == repeat["prefill_tokens"] + repeat["step_tokens"]
            assert repeat["tokens"] == rows["plain", size]["repeats"][0]["tokens"]
            assert repeat["step_tokens"] == sum(int(n) * steps for n, steps in row["histogram"].items())
            assert repeat["steps"] == sum(row["histogram"].values())
            assert repeat["passes"] <= repeat["steps"] <= size * repeat["passes"]
            if arm not in BATCH_OF_ONE:  # transformers' assisted decoding accepts drafts in its first pass
                assert repeat["prefill_tokens"] == row["prompts"]
        assert row["tokens_per_step"] == pytest.approx(repeat["step_tokens"] / repeat["steps"])
    assert rows["plain", 1]["tokens_per_step"] == rows["generate", 1]["tokens_per_step"] == 1
    assert rows["draft-model", 1]["tokens_per_step"] > 2, "a model drafts for itself without a miss"
    assert rows["plain", 1]["over_plain"] == {"median": 1, "minimum": 1, "maximum": 1}
    categories = {(row["category"], row["arm"]): row["prompts"] for row in result["categories"]}
    assert categories == {(name, arm): count for name, count in (("qa", 2), ("writing", 3)) for arm in ARMS}
    assert result["setting"]["dtype"] == "float32"
    assert result["setting"]["prompt_tokens"][0] > 0
    assert {"torch", "transformers", "threads"} <= result["environment"].keys()
    assert result["definitions"].keys() >= {"tokens_per_step", "tokens_per_second", "outside_forward"}
    assert all(shown.count(f"\n{arm} ") == (1 if arm in BATCH_OF_ONE else 2) for arm in ARMS)
    assert "writing" in shown
    assert "plain+compiled" not in shown, "nothing was compiled"


def answer(histogram, seconds, batch_size=1):
    steps = sum(tokens * count for tokens, count in histogram.items())
    return Answer("k", "q", "medusa", 0, [Turn(1 + steps, 1, 1.0, seconds, "", histogram=histogram)], batch_size)


@pytest.mark.parametrize("arm", ["medusa", "medusa-lookup"])
def test_a_batch_is_decoded_with_its_own_tree(arm, tiny_llama):
    model = MedusaModel(tiny_llama, random_heads(), Tree.from_paths(PATHS), batch_trees={2: Tree.chain(1)})
    for rows, size in ((1, len(PATHS) + 1), (2, 2), (3, 2)):
        texts = [torch.tensor([5, 6 + row, 7]) for row in range(rows)]  # in which nothing repeats
        out = model.generate(texts, 10, max_steps=1, eos_token_ids=(), drafter=DRAFTERS[arm](model, None))
        assert out.stats.pass_sizes == {size: 1}


def test_categories_are_of_their_own_prompts_and_a_quick_end_has_no_speed():
    questions = [Question([], category=kind) for kind in ("qa", "writing", "qa", "", "math")]
    found = [answer({2: 3}, 1.0), answer({1: 4}, 2.0), answer({4: 1}, 1.0), answer({9: 9}, 1.0), answer({}, 0.0)]
    qa, writing, math = by_category(questions, {"medusa": [found] * 2})
    assert (qa["prompts"], qa["tokens_per_step"]) == (2, 2.5)
    assert qa["tokens_per_second"] == {"median": 5, "minimum": 5, "maximum": 5}
    assert (writing["prompts"], writing["tokens_per_step"], writing["tokens_per_second"]["median"]) == (1, 1, 2)
    assert (math["prompts"], math["tokens_per_step"], math["tokens_per_second"]) == (1, None, None)


def test_a_batch_takes_as_many_passes_as_its_longest_answer_has_steps():
    steps = [{2: 3}, {1: 5}, {}, {3: 1}]
    assert passes([answer(each, 1.0) for each in steps]) == 3 + 5 + 0 + 1
    assert passes([answer(each, 1.0, 2) for each in steps]) == 5 + 1
    assert passes([answer(each, 1.0, 4) for each in steps]) == 5


def test_a_killed_comparison_goes_on_where_it_was_and_leaves_its_figures_alone(command, files, monkeypatch):
    out, asked = files / "bench.json", []
    words = [files / "heads", "--prompts", files / "prompts.jsonl", "--dtype", "float32", "--max-new-tokens", 10]
    words += ["--repeats", 2, "--arms", "plain,medusa", "--batch-sizes", "1,2", "--out", out]
    real = local_ask

    def counting(*parts, most=None):
        ask = real(*parts)

        def asking(questions, budget):
            if budget == 10:  # not to warm up
                if most is not None and len(asked) == most:
                    raise KeyboardInterrupt
                asked.append(len(questions))
            return ask(questions, budget)

        return asking

    monkeypatch.setattr("medusa_train.eval.bench.local_ask", partial(counting, most=9))
    code, _, _ = command(*words)
    assert code != 0
    assert not out.exists()
    monkeypatch.setattr("medusa_train.eval.bench.local_ask", counting)
    code, _, error = command(*words)
    assert code == 0, error
    assert asked == [1] * 20 + [2] * 8, "two arms, two repeats, five prompts and two batches, each once"
    result = json.loads(out.read_text())
    assert [row["identical_to_plain"] for row in result["rows"]] == [1] * 4
    assert sorted(path.name for path in files.glob("bench*")) == ["bench.json"]


def test_what_is_outside_the_forward_is_all_but_it():
    model = SimpleNamespace(backbone=SimpleNamespace(device=torch.device("cpu")))
    stats = DecodeStats(draft_seconds=1.0, forward_seconds=6.0, verify_seconds=2.0, commit_seconds=1.0)
    assert outside_forward(model, NoDrafter(), [], [stats, DecodeStats(forward_seconds=10.0)]) == pytest.approx(0.2)
    assert outside_forward(model, NoDrafter(), [], [DecodeStats()]) is None


def test_prompts_fit_up_to_the_last_position():
    backbone = SimpleNamespace(max_positions=10)
    check_prompts(backbone, [[0] * 3, [0] * 6], [1, 2], 4)
    with pytest.raises(UserError, match="exceeds the backbone's 10"):
        check_prompts(backbone, [[0] * 3, [0] * 6], [1, 2], 5)
    with pytest.raises(UserError, match="a batch of 3 needs as many prompts"):
        check_prompts(backbone, [[0] * 3, [0] * 6], [1, 3], 4)


def test_some_arms_of_some_prompts_without_categories(command, files):
    prompts = files / "plain.jsonl"
    prompts.write_text('{"prompt": "what is this ?"}\n{"messages": [{"role": "user", "content": "and the cat ?"}]}\n')
    out = files / "bench.json"
    code, shown, error = command(
        files / "heads", "--prompts", prompts, "--dtype", "float32", "--max-new-tokens", 6, "--repeats", 1,
        "--num-prompts", 1, "--arms", "medusa,lookup", "--out", out,
    )  # fmt: skip
    assert code == 0, error
    result = json.loads(out.read_text())
    assert [row["arm"] for row in result["rows"]] == ["medusa", "lookup"]
    assert result["setting"]["prompts"] == 1
    assert result["categories"] == []
    assert result["rows"][0]["over_plain"] is None
    assert "n/a" in shown
    assert "category" not in shown


def test_questions_come_in_three_kinds(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    user = {"role": "user", "content": "the mat ?"}
    answer = {"role": "assistant", "content": "yes"}
    records = [{"prompt": "the mat ?"}, {"messages": [user, answer]}, {"turns": ["the mat ?", "why"], "category": "qa"}]
    path = tmp_path / "kinds.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    questions = load_questions(str(path))
    # Two that ask the same are one.
    assert [(question.category, question.follow_ups) for question in questions] == [("", ()), ("qa", ("why",))]
    assert questions[0].messages == questions[1].messages == [user]


def test_every_arm_can_be_had_by_default():
    assert choose_arms(None, True, [1, 2]) == list(ARMS)
    assert not {"draft-model", "generate-assisted"} & set(choose_arms(None, False, [1]))
    assert not set(BATCH_OF_ONE) & set(choose_arms(None, True, [2]))
    assert choose_arms("plain, medusa,plain", False, [1]) == ["plain", "medusa"]
    assert parse_batch_sizes("4, 1,4") == [4, 1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--arms", "plain,medussa"], ["--arms 'medussa' is unknown", "did you mean medusa?"]),
        (["--arms", "zzz"], ["there are generate", "draft-model"]),
        (["--arms", "draft-model"], ["--arms draft-model needs a small model", "--draft-model"]),
        (["--arms", "generate-lookup", "--batch-sizes", "2"], ["one prompt at a time", "--batch-sizes"]),
        (["--batch-sizes", "1,0"], ["--batch-sizes 1,0", "positive whole numbers"]),
        (["--batch-sizes", "two"], ["--batch-sizes two", "positive whole numbers"]),
        (["--prompts", "none.jsonl"], ["prompts none.jsonl: no such file"]),
        (["--prompts", "none.txt"], ["name a .jsonl file"]),
        (["--dtype", "float8"], ["--dtype 'float8' is unknown", "float"]),
        (["--accepted-histogram", "1"], ["goes with --simulate-shape"]),
        (["--out", "."], ["is a folder"]),
        (["--batch-sizes", "8"], ["a batch of 8 needs as many prompts, there are 5"]),
        (["--max-new-tokens", "5000"], ["--max-new-tokens 5000", "exceeds the backbone's 256"]),
    ],
)
def test_mistakes_are_told_in_one_line(command, files, options, told):
    words = [] if "--prompts" in options else ["--prompts", files / "prompts.jsonl"]
    code, shown, error = command(files / "heads", *words, *options)
    # Loading a model shows its progress; what is found before that is one line alone.
    assert_refused((code, shown, error if "Loading" not in error else error.splitlines()[-1] + "\n"), *told)


def test_prompts_and_heads_are_needed(command, files):
    assert_refused(command(files / "heads"), "--prompts FILE.jsonl")
    assert_refused(command("--prompts", files / "prompts.jsonl"), "name HEADS")


def test_heads_without_calibration_have_no_adaptive_arm(command, files):
    save_tree(files / "heads", Tree.from_paths(PATHS))
    words = [files / "heads", "--prompts", files / "prompts.jsonl", "--dtype", "float32", "--max-new-tokens", 4]
    words += ["--num-prompts", 1, "--repeats", 1]
    code, shown, error = command(*words)
    assert code == 0, error
    assert "\nmedusa " in shown
    assert "\nadaptive " not in shown
    code, _, error = command(*words, "--arms", "adaptive")
    assert code == 2
    assert "medusa-train tree" in error.splitlines()[-1]


# Simulation


def test_a_simulation_accepts_what_it_is_told(command, tmp_path):
    out = tmp_path / "simulation.json"
    code, shown, error = command(
        "--simulate-shape", "tiny", "--dtype", "float32", "--repeats", 1, "--batch-sizes", "1,3",
        "--accepted-histogram", "0.5,0.3,0.15,0.05", "--out", out,
    )  # fmt: skip
    assert code == 0, error
    result = json.loads(out.read_text())
    assert [(row["batch_size"], row["tree_size"]) for row in result["rows"]] == [
        (batch, size) for batch in (1, 3) for size in TREE_SIZES
    ]
    for row in result["rows"]:
        wanted = 1 if row["tree_size"] == 1 else 1.75
        assert row["tokens_per_step"] == pytest.approx(wanted, abs=0.05)
        plain = next(
            each for each in result["rows"] if (each["batch_size"], each["tree_size"]) == (row["batch_size"], 1)
        )
        assert len(row["repeats"]) == 1, "the round that warms up is not among them"
        assert row["ratio"]["median"] == pytest.approx(row["step_ms"]["median"] / plain["step_ms"]["median"])
        assert row["tokens_per_second"]["median"] == pytest.approx(
            1000 * row["batch_size"] * row["tokens_per_step"] / row["step_ms"]["median"]
        )
        assert row["repeats"][0]["steps"] == result["setting"]["steps"] * row["batch_size"]
        assert all(seconds > 0 for seconds in row["parts_ms"].values())
        assert row["speedup"]["median"] == pytest.approx(row["tokens_per_step"] / row["ratio"]["median"])
        assert (row["ratio"]["median"] == 1) == (row["tree_size"] == 1)
    assert "not measured" in shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--simulate-shape", "lama-3-8b"], ["--simulate-shape 'lama-3-8b' is unknown", "did you mean llama-3-8b?"]),
        (["--simulate-shape", "tiny", "--accepted-histogram", "0.5,0.6"], ["add up to 1", "1.1"]),
        (["--simulate-shape", "tiny", "--accepted-histogram", "half"], ["give shares like 0.5,0.3,0.2"]),
        (["--simulate-shape", "tiny", "--accepted-histogram", "0,0,0,0,0,0,0,0,1"], ["can accept 7 drafts"]),
        (["--simulate-shape", "tiny", "--arms", "plain"], ["takes no --arms"]),
        (["./heads", "--simulate-shape", "tiny"], ["takes no HEADS"]),
    ],
)
def test_mistakes_of_a_simulation(command, options, told):
    assert_refused(command(*options), *told)


@pytest.mark.parametrize("size", TREE_SIZES)
@pytest.mark.parametrize("depth", [3, 7])
def test_simulated_trees_hold_the_chain(size, depth):
    tree = likely_tree(size, depth)
    assert tree.size == size
    if size > 1:
        assert tree.depth == depth
        assert (0,) * depth in tree.paths
        tree.check(depth, 10)


def test_simulated_trees_hold_the_likeliest_nodes():
    """Ranks are right once in 2, 8 and 18 times."""
    assert likely_tree(4, 2) == Tree.from_paths([(0,), (0, 0), (1,)])
    assert likely_tree(7, 2) == Tree.from_paths([(0,), (0, 0), (1,), (0, 1), (1, 0), (2,)])


def test_a_deck_has_the_histograms_shares_at_random():
    histogram = parse_histogram("0.2,0,0.5,0.3")
    deck = accepted_deck(histogram, 100, seed=1)
    assert [deck.count(accepted) for accepted in range(4)] == [20, 0, 50, 30]
    assert deck != accepted_deck(histogram, 100, seed=2)
    assert set(accepted_deck([1.0], 5, seed=0)) == {0}


def test_parts_are_those_of_every_step(files, tiny_chat_folder):
    model = MedusaModel.from_pretrained(files / "heads", dtype="float32", device="cpu")
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    for drafter in (NoDrafter(), model.drafter):
        stopping = Stopping(40, max_steps=6)
        steps = part_seconds(model.step, drafter, verify_greedy, prompts, stopping)
        assert len(steps) == 6
        assert all(list(step) == ["draft", "forward", "verify", "commit"] for step in steps)
        assert all(seconds >= 0 for step in steps for seconds in step.values())


def test_the_gpu_script_ends_with_one_line_where_there_is_no_gpu(tmp_path):
    if torch.cuda.is_available() or shutil.which("bash") is None:
        pytest.skip("there is a GPU")
    script = Path(__file__).parents[2] / "scripts" / "bench_gpu.sh"
    process = subprocess.run(
        ["bash", str(script)],
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert "no CUDA device" in process.stderr
    assert not (tmp_path / "out").exists()


def test_a_draft_model_is_needed_when_the_function_is_called_without_one(files, tiny_chat_folder):
    model = MedusaModel.from_pretrained(files / "heads", dtype="float32", device="cpu")
    with pytest.raises(UserError, match="--draft-model"):
        DRAFTERS["draft-model"](model, None)
