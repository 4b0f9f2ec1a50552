"""Every stage on a tiny model: the whole run, interrupted anywhere, gives what an unbroken run gives."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

import medusa_train.data.hidden_states
import medusa_train.data.transformers_backend
from conftest import assert_refused
from medusa_train.data.hidden_states import position_bytes, read_cache
from medusa_train.data.rows import SPLITS
from medusa_train.eval.acceptance import replay, token_ranks
from medusa_train.eval.tree_search import count_prefixes, expected_tokens
from medusa_train.inference import MedusaModel, Tree, UserError
from medusa_train.inference.stats import DecodeStats
from medusa_train.job import Job
from medusa_train.recipe import load_recipe
from medusa_train.stages import STAGES, run_stages

WORDS = ["what", "is", "the", "cat", "on", "mat", "and", "this", "that", "sat", "user", "system"]


@pytest.fixture
def recipe_file(tmp_path, tiny_chat_folder):
    prompts = tmp_path / "prompts.jsonl"
    texts = {" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 4 + i % 5)) for i in range(60)}
    prompts.write_text("".join(json.dumps({"prompt": f"{text} ?"}) + "\n" for text in sorted(texts)))
    recipe = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"num_heads": 2, "num_layers": 1, "draft_vocab_size": 128},
        "data": {
            "prompts": str(prompts), "num_prompts": None, "max_new_tokens": 12, "batch_size": 8,
            "calibration_share": 0.2, "heldout_share": 0.2,
        },
        "training": {"num_train_epochs": 2, "per_device_train_batch_size": 32, "save_steps": 4, "logging_steps": 4},
        "inference": {"tree_sizes": [1, 4], "step_time_rounds": 1, "step_time_steps": 2},
        "eval": {"num_prompts": 3, "max_new_tokens": 10, "repeats": 2},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run(recipe_file, *overrides, last="eval", overwrite=False):
    job = Job(load_recipe(recipe_file, overrides))
    run_stages(job, last, overwrite)
    return job


@pytest.mark.parametrize(("kind", "lm_head"), [("medusa", "own"), ("hydra", "own"), ("medusa", "shared")])
def test_the_whole_run(recipe_file, kind, lm_head):
    overrides = (f"heads.kind={kind}", f"heads.lm_head={lm_head}")
    job = run(recipe_file, *overrides)
    report = json.loads((job.folder.path / "report.json").read_text())
    acceptance = report["acceptance"]
    emitted = sum(int(size) * steps for size, steps in acceptance["histogram"].items())
    assert acceptance["emitted_by_steps"] == emitted
    assert acceptance["tokens_per_step"] == pytest.approx(emitted / acceptance["steps"])
    assert report["losslessness"]["over_plain"] == {"identical_share": 1, "differences": []}
    assert report["losslessness"]["over_generate"]["identical_share"] == 1
    html = (job.folder.path / "report.html").read_text()
    assert html.count("<svg") == (5 if report["setting"]["tree_paths"] else 3)
    assert "http://" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ), "the report must not load anything"
    assert (job.folder.heads / "README.md").read_text().startswith("---\nlibrary_name")
    # No held-out prompt was trained on.
    ids = {split: {row.id for row in job.rows(split)} for split in ("train", "calibration", "heldout")}
    assert not ids["heldout"] & (ids["train"] | ids["calibration"])
    # The heads folder stands alone: it names its backbone.
    model = MedusaModel.from_pretrained(job.folder.heads, dtype="float32")
    assert model.heads.config.kind == report["setting"]["kind"] == kind
    assert model.tree.size == report["setting"]["tree_size"]
    # A second run does nothing.
    before = {path: path.stat().st_mtime_ns for path in job.folder.path.rglob("*") if path.is_file()}
    run(recipe_file, *overrides)
    assert before == {path: path.stat().st_mtime_ns for path in job.folder.path.rglob("*") if path.is_file()}


def test_replay_of_the_cache_predicts_what_decoding_measures(recipe_file):
    """Ranks from cached states and a real run of the same prompts must agree step for step."""
    # Learnt by heart, and a fixed tree size, so that branches are accepted.
    job = run(
        recipe_file, "training.num_train_epochs=40", "training.learning_rate=0.02", "inference.tree_sizes=[6]",
        last="tree",
    )  # fmt: skip
    model = job.medusa_model()
    rows = job.rows("train")
    shards = read_cache(job.folder.stage("cache") / "train")
    predicted = replay(token_ranks(model, shards), model.tree)
    measured = DecodeStats()
    for row in rows:
        prompt = torch.tensor(row.input_ids[: row.spans[0][0]])
        out = model.generate(prompt, max_new_tokens=12, stats=measured)
        assert out.sequences[0].tolist() == row.input_ids
    # Cached states are bf16, decoding is fp32: a near-tie between two ranks may fall either way.
    assert predicted.prefill_tokens == measured.prefill_tokens
    assert predicted.tokens_per_step == pytest.approx(measured.tokens_per_step, abs=0.05)
    assert sum((predicted.histogram - measured.histogram).values()) < 0.1 * measured.steps
    assert predicted.tokens_per_step > 1.2, "these heads learnt nothing, so the comparison says nothing"


def test_a_tree_from_the_recipe_is_used_as_it_is(recipe_file):
    paths = [[0], [1], [0, 3], [20], [21], [22], [23]]
    job = run(recipe_file, f"inference.tree={paths}", last="tree")
    model, result = job.medusa_model(), job.folder.result("tree")["result"]
    assert model.tree == Tree.from_paths(paths)
    assert (result["chosen_size"], result["given"], result["chosen_because"]) == (8, True, "given by the recipe")
    assert [row["size"] for row in result["sizes"]] == [1, 4, 8]
    assert all(row["step_ms"] > 0 for row in result["sizes"])
    # What the report expects of it counts the ranks that the search leaves out.
    ranks = token_ranks(model, read_cache(job.folder.stage("cache") / "calibration"))
    everywhere = expected_tokens(count_prefixes(ranks.calibration(), 128), model.tree)
    assert result["sizes"][2]["expected_tokens_per_step"] == everywhere
    # Adaptive drafting chooses among the measured sizes of its own superset.
    assert model.calibration.sizes == [1, 4]
    out = model.generate(torch.tensor([1, 2, 3]), 8, drafter=model.adaptive_drafter())
    assert out.new_tokens == model.generate(torch.tensor([1, 2, 3]), 8).new_tokens
    report = run(recipe_file, f"inference.tree={paths}").folder.path / "report.html"
    assert "tree of 8 tokens per pass (given in the recipe)" in report.read_text()


def test_a_damaged_tree_is_made_anew(recipe_file):
    path = run(recipe_file, last="tree").folder.heads / "tree.json"
    path.write_text('{"paths": [[0]], "adaptive": {"nodes": 3}}')
    with pytest.raises(UserError, match="run medusa-train tree --overwrite"):
        run(recipe_file)
    job = run(recipe_file, last="tree", overwrite=True)
    assert job.medusa_model().calibration.sizes == [1, 4]


def test_measurements_alone_are_repeated_for_the_same_recipe(recipe_file):
    stages = run(recipe_file).folder.path

    def repeated(last):
        before = {name: (stages / name / "run.json").stat().st_mtime_ns for name in STAGES}
        run(recipe_file, last=last, overwrite=True)
        return {
            name for name in STAGES
            if not (path := stages / name / "run.json").exists() or path.stat().st_mtime_ns != before[name]
        }  # fmt: skip

    assert repeated("eval") == {"eval"}
    assert repeated("train") == set()
    assert repeated("tree") == {"tree", "eval"}, "the evaluation was of the other tree"
    assert not (stages / "eval").exists()


def test_steps_are_timed_and_a_tree_is_chosen_for_every_batch_size(recipe_file):
    """Times are given, so that both batch sizes have a tree of their own; every other round is slower by half."""

    def choose(*batch_sizes, seconds=lambda size: 1e-9 * size**4, **overrides):
        def measure(model, cells, *rest):
            best = [
                seconds(tree.size) if len(prompts) > 1 else 1.0 if tree.size == 1 else 0.98 for tree, prompts in cells
            ]
            if len({len(prompts[0]) for _, prompts in cells}) > 1:  # for what text adds, at a rate of its own
                best = [1 + 1e-6 * tree.size * sum(map(len, prompts)) for tree, prompts in cells]
            return [[time, 1.5 * time] for time in best]

        words = [f"inference.batch_sizes={list(batch_sizes)}", *(f"inference.{k}={v}" for k, v in overrides.items())]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("medusa_train.tree_stage.measure_step_seconds", measure)
            # Rerun where only the times are others.
            job = run(recipe_file, *words, last="tree", overwrite=bool(asked))
        asked.append(batch_sizes)
        tree_file = json.loads((job.folder.heads / "tree.json").read_text())
        told = [tree_file["chosen_because"], *(batch["chosen_because"] for batch in tree_file["batches"].values())]
        shards = list(read_cache(job.folder.stage("cache") / "calibration"))
        result = job.folder.result("tree")["result"]
        # Every answer token but the first is one that head 1 should have drafted.
        assert result["calibration_positions"] == sum(
            int((torch.arange(1, len(shard.tokens) + 1) < shard.ends).sum()) for shard in shards
        )
        (row,) = (row for row in result["sizes"] if (row["batch_size"], row["size"]) == (
            1, result["chosen_size"]))  # fmt: skip
        assert 1 + sum(gain for _, gain in result["gains"]) == pytest.approx(row["expected_tokens_per_step"])
        assert [each["size"] for each in result["compared"][:2]] == [result["chosen_size"]] * 2
        assert result["compared"][0]["step_ms"] == pytest.approx(row["step_ms"])
        return job.medusa_model(), result | {"told": told}

    asked = []
    model, result = choose(1, 3)
    assert {(row["batch_size"], row["size"]) for row in result["sizes"]} == {
        (rows, size) for rows in (1, 3) for size in model.calibration.sizes
    }
    assert model.calibration.step_seconds.keys() == {1, 3}
    assert result["step_time_noise"] == 0.05
    sizes = model.calibration.sizes
    assert model.calibration.text_seconds == pytest.approx(
        {size: 1e-6 * size for size in (1, sizes[len(sizes) // 2], sizes[-1])}
    )
    for row in result["sizes"]:
        assert row["step_ms"] == pytest.approx(1000 * model.calibration.step_seconds[row["batch_size"]][row["size"]])
        assert row["expected_tokens_per_second"] == pytest.approx(
            row["batch_size"] * 1000 * row["expected_tokens_per_step"] / row["step_ms"]
        )
        if row["batch_size"] == 1:  # a fall of 2 % is noise
            assert row["measured_step_ms"] == (1000 if row["size"] == 1 else 980)
            assert 980 < row["step_ms"] < 1000
        else:
            assert row["measured_step_ms"] == row["step_ms"] == pytest.approx(1e-6 * row["size"] ** 4)
    best = {row["batch_size"]: row["size"] for row in result["best_sizes"]}
    assert best == {1: max(model.calibration.sizes), 3: min(model.calibration.sizes)}
    assert model.tree.size == best[1]
    # Two rows lie between, where the flat times of one prevail; more than three are reckoned from the steep ones of
    # three.
    trees = {rows: tree.size for rows, tree in model.batch_trees.items()}
    assert trees == {2: best[1]} | dict.fromkeys((3, 4, 8, 16, 32), best[3])
    told = "reckoned from those timed, the fastest of"
    assert [told in each for each in result["told"]] == [False, True, False, True, True, True, True]
    expected = {row["size"]: row["expected_tokens_per_step"] for row in result["sizes"]}
    model, result = choose(3, max_rank=1)
    assert model.drafter.tree_for(3).size == best[3]
    assert model.calibration.step_seconds.keys() == {1, 3}
    assert [told.split(",")[0] for told in result["told"]] == [
        f"at batch size {rows}" for rows in (1, 2, 3, 4, 8, 16, 32)
    ]
    assert {rank for path in model.calibration.superset.paths for rank in path} == {0}, "no other rank may be used"
    # Slower by 3 %, which is less than the noise, with more tokens per step.
    model, result = choose(
        3, seconds=lambda size: 1.03 * expected[size] if size in expected and size > 1 else float(size)
    )
    assert model.drafter.tree_for(3).size == best[1]
    assert "within the noise of 5.0%" in result["told"][2]


def test_a_benchmark_is_asked_and_the_report_grows(recipe_file, tmp_path, command):
    """Evaluate on a file with categories, then add the tests of losslessness and the costs."""
    asked = tmp_path / "asked.jsonl"
    records = [
        {"turns": [f"what is the {word} ?", "and that ?"], "category": word[0]} for word in ("cat", "mat", "hat")
    ]
    asked.write_text("".join(json.dumps(record) + "\n" for record in records))
    overrides = [f"eval.benchmark={asked}", "eval.num_prompts=2", "eval.repeats=1", "inference.tree=[[0],[1],[0,0]]"]
    overrides.append("inference.batch_sizes=[2]")
    code, printed, error = command("quickstart", *overrides, "--recipe", recipe_file)
    assert code == 0, error
    folder = tmp_path / "run"
    chat, card = printed.splitlines()[-2:]  # what to do next, to be pasted
    assert chat.endswith(f"chat {folder / 'heads'}")
    assert card.endswith(f"publish {folder / 'heads'} you/name --backbone org/model --dry-run")
    report = json.loads((folder / "report.json").read_text())
    assert (report["setting"]["asked"], report["setting"]["prompts"], report["setting"]["turns"]) == (
        "asked.jsonl",
        2,
        4,
    )
    assert len(report["categories"]) == 2
    step_ms = {(row["batch_size"], row["size"]): row["step_ms"] for row in report["made"]["tree"]["result"]["sizes"]}
    assert report["model"]["overhead"] == pytest.approx(step_ms[1, 4] / step_ms[1, 1]), "prompts are answered alone"
    assert report["evaluation"]["decoding_seconds"] < report["evaluation"]["wall_seconds"]
    lines = (folder / "eval" / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 3
    code, shown, error = command("lossless", recipe_file, *overrides, "--samples", 24, "--tokens", 3)
    assert code == 0, error
    assert "100 % of 2 outputs identical" in shown
    code, shown, error = command("cost", folder, "--price", 2, "--bandwidth", 50, "--watts", 100)
    assert code == 0, error
    assert shown.count("assumed: ") == 5
    # A new evaluation of the same heads keeps both.
    code, _, error = command("eval", recipe_file, *overrides, "eval.max_new_tokens=6", "--overwrite")
    assert code == 0, error
    report = json.loads((folder / "report.json").read_text())
    assert report["lossless"]["greedy"]["identical_share"] == 1
    assert [row["arm"] for row in report["cost"]["rows"]] == ["plain", "medusa"]
    page = (folder / "report.html").read_text()
    assert "What a million tokens cost" in page
    assert report["lossless"]["sampling"]["verdict"] in page
    assert_refused(command("eval", recipe_file, "eval.benchmark=spec_bnch"), "did you mean spec_bench?")
    assert_refused(command("eval", recipe_file, "eval.arms=[plain]"), "medusa must be among the arms")
    assert_refused(command("lossless", folder / "heads"), "name --prompts FILE")
    assert_refused(command("lossless", recipe_file, *overrides, "--out", folder), "is a folder; name a JSON file")
    assert_refused(command("cost", tmp_path, "--price", 1, "--bandwidth", 1), "name a run's folder")


class Killed(BaseException):
    """Stands for a kill: nothing in the code under test may catch it."""


def interrupt(monkeypatch, module, name, calls):
    """Let the ``calls``-th call of a function die."""
    original, count = getattr(module, name), iter(range(calls))

    def dying(*args, **kwargs):
        if next(count, None) is None:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, dying)


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        (medusa_train.data.transformers_backend, "generate_batch", 2),
        (medusa_train.data.hidden_states, "write_tensors", 1),
        (medusa_train.data.hidden_states, "write_tensors", 9),  # the second shard of the cache
        (torch.optim.AdamW, "step", 6),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_result(recipe_file, monkeypatch, module, name, calls):
    unbroken = run(recipe_file, f"output_dir={recipe_file.parent / 'unbroken'}", last="train")
    with monkeypatch.context() as patch:
        interrupt(patch, module, name, calls)
        with pytest.raises(Killed):
            run(recipe_file, last="train")
    resumed = run(recipe_file, last="train")
    rows = [(job.folder.stage("distill") / "rows.jsonl").read_text() for job in (unbroken, resumed)]
    assert rows[0] == rows[1]
    ours, theirs = (load_file(job.folder.heads / "medusa_lm_head.safetensors") for job in (resumed, unbroken))
    for tensor in theirs:
        assert torch.equal(ours[tensor], theirs[tensor]), tensor


def test_training_moves_heads_and_leaves_the_backbone_alone(recipe_file, tiny_chat_folder):
    before = load_file(tiny_chat_folder / "model.safetensors")
    job = run(recipe_file, last="train")
    result = job.folder.result("train")["result"]
    assert result["last_loss"] < result["first_loss"]
    after = job.backbone.model.get_input_embeddings().weight
    assert torch.equal(after, before["model.embed_tokens.weight"])
    tensors = load_file(job.folder.heads / "medusa_lm_head.safetensors")
    for head in range(2):
        assert float(tensors[f"{head}.0.linear.weight"].abs().sum()) > 0
        assert float(tensors[f"{head}.0.linear.bias"].abs().sum()) > 0


def test_a_torn_checkpoint_is_not_trusted(recipe_file, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, torch.optim.AdamW, "step", 10)
        with pytest.raises(Killed):
            run(recipe_file, last="train")
    folder = load_recipe(recipe_file).output_dir
    newest = max(os.listdir(f"{folder}/train"), key=lambda name: name.startswith("checkpoint") and int(name[11:]))
    state = f"{folder}/train/{newest}/trainer_state.json"
    with open(state, "r+") as file:
        file.truncate(20)
    run(recipe_file, last="train")
    assert not Path(state).exists() or json.loads(Path(state).read_text())


def told_stages(capsys):
    """What became of each stage, as the command told it."""
    lines = (line.partition(": ") for line in capsys.readouterr().out.splitlines())
    return [
        (name, "kept" if text.startswith("done, kept") else "made")
        for name, _, text in lines
        if name in STAGES and (text.startswith("done, kept") or text.endswith(" s)"))
    ]


def test_a_stage_makes_the_missing_ones_before_it(recipe_file, capsys):
    job = run(recipe_file, last="distill")
    assert told_stages(capsys) == [("prompts", "made"), ("distill", "made")]
    run(recipe_file, last="train")
    assert told_stages(capsys) == [("prompts", "kept"), ("distill", "kept"), ("cache", "made"), ("train", "made")]
    assert not job.folder.stage("tree").exists(), "nothing behind it is begun"
    # Another recipe is refused, or made anew from where it differs.
    with pytest.raises(UserError, match=r"distill was made with data.max_new_tokens=12, .* use --overwrite"):
        run(recipe_file, "data.max_new_tokens=9", last="train")
    assert told_stages(capsys) == []
    run(recipe_file, "data.max_new_tokens=9", last="train", overwrite=True)
    assert told_stages(capsys) == [("prompts", "kept"), ("distill", "made"), ("cache", "made"), ("train", "made")]


def test_conversations_from_a_file_are_learnt_as_they_are(recipe_file, tmp_path):
    talks = tmp_path / "talks.jsonl"
    records = [
        {"messages": [
            {"role": "user", "content": f"what {word} ?"},
            {"role": "assistant", "content": f"the {word} sat on the mat"},
        ]}
        for word in WORDS
    ] + [{"messages": [{"role": "user", "content": "nobody answers"}]}]  # fmt: skip
    talks.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError, match=r"talks\.jsonl line 13: no turn of an assistant; .*data\.on_bad_rows=skip"):
        run(recipe_file, f"data.conversations={talks}", last="distill")
    words = (f"data.conversations={talks}", "data.on_bad_rows=skip")
    job = run(recipe_file, *words, last="cache")
    rows = [row for split in ("train", "calibration", "heldout") for row in job.rows(split)]
    assert len(rows) == len(WORDS)
    for row in rows:
        (start, end), ids = row.spans[0], row.input_ids
        assert job.tokenizer.decode(ids[start:end]).endswith("sat on the mat<|im_end|>")


def test_a_cache_that_the_disk_cannot_hold_is_refused_before_it_starts(recipe_file, monkeypatch, capsys):
    run(recipe_file, last="distill")
    for dtype in ("bfloat16", "float8"):
        with monkeypatch.context() as patched:
            patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
            with pytest.raises(UserError, match=r"take 0\.0 GB, and the disk of .*cache has 0\.0 GB free; .*float8"):
                run(recipe_file, f"data.cache_dtype={dtype}", last="cache")
    job = run(recipe_file, "data.cache_dtype=float8", last="cache")
    needed = sum(path.stat().st_size for path in job.folder.stage("cache").rglob("*.safetensors"))
    positions = sum(len(shard.tokens) for split in SPLITS for shard in read_cache(job.folder.stage("cache") / split))
    assert f"cache: {positions} positions, 0.00 GB;" in capsys.readouterr().out
    assert positions * position_bytes(32, "float8") < needed
    assert not (job.folder.stage("distill") / "states").exists()
