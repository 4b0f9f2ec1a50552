"""The folder of a run: whose it is, what is done in it, and what --overwrite may remove."""

import json
import time

import pytest

from medusa_train.inference import UserError
from medusa_train.recipe import Recipe
from medusa_train.run_folder import STAGE_KEYS, RunFolder

STAGES = list(STAGE_KEYS)
# A change of the recipe, as it is told, and the first stage that it makes stale.
CHANGES = [
    ("seed", 0, 1, "prompts"),
    ("backbone.source", "model", "other", "prompts"),
    ("data.num_prompts", 640, 5, "prompts"),
    ("data.max_new_tokens", 512, 64, "distill"),
    ("heads.num_heads", 3, 2, "train"),
    ("training.learning_rate", 0.002, 0.5, "train"),
    ("inference.max_rank", 10, 3, "tree"),
    ("eval.repeats", 3, 9, "eval"),
]
# How the work is done, not what comes out of it.
HARMLESS = {"output_dir", "backbone.device", "backbone.trust_remote_code", "data.cache_batch_tokens"}
HARMLESS |= {"data.on_bad_rows"}  # rows that were made held none, or were counted
HARMLESS |= {f"data.server.{field}" for field in ("urls", "concurrency", "timeout", "retries")}


def run_folder(path, key=None, value=None):
    content = {"output_dir": str(path), "backbone": {"source": "model"}}
    if key:
        section, _, field = key.rpartition(".")
        target = content.setdefault(section, {}) if section else content
        target[field] = value
    return RunFolder(Recipe.model_validate(content))


@pytest.fixture
def finished(tmp_path):
    """A run whose stages are all done."""
    folder = run_folder(tmp_path / "run")
    for stage in STAGES:
        (folder.begin(stage) / "output").write_text(stage)
        folder.finish(stage, time.time(), [], {"made": stage})
    folder.heads.mkdir()
    (folder.heads / "weights").write_text("heads")
    return folder


def content_of(folder):
    return {path.relative_to(folder.path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


def test_the_same_recipe_finds_its_stages_done(finished):
    again = run_folder(finished.path)
    again.check(STAGES, overwrite=False)
    assert all(again.done(stage) for stage in STAGES)
    assert [again.result(stage)["result"] for stage in STAGES] == [{"made": stage} for stage in STAGES]


@pytest.mark.parametrize(("key", "old", "new", "stage"), CHANGES)
def test_another_recipe_is_refused_with_the_difference_named(finished, key, old, new, stage):
    before = content_of(finished)
    other = run_folder(finished.path, key, new)
    other.check(STAGES[: STAGES.index(stage)], overwrite=False)  # the stages in front do not depend on it
    with pytest.raises(UserError) as caught:
        other.check(STAGES, overwrite=False)
    assert f"{finished.stage(stage)} was made with {key}={old}, the recipe says {new}" in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert content_of(finished) == before


@pytest.mark.parametrize(("key", "new", "stage"), [(key, new, stage) for key, _, new, stage in CHANGES])
def test_overwrite_removes_the_stale_stage_and_those_behind_it_alone(finished, key, new, stage):
    before = content_of(finished)
    stale = STAGES[STAGES.index(stage) :]
    run_folder(finished.path, key, new).check(STAGES, overwrite=True)
    gone = {*stale, "heads"} if "train" in stale else set(stale)
    assert content_of(finished) == {path: text for path, text in before.items() if path.parts[0] not in gone}


def test_overwrite_leaves_a_run_of_the_same_recipe_alone(finished):
    before = content_of(finished)
    run_folder(finished.path).check(STAGES, overwrite=True)
    assert content_of(finished) == before


def test_every_key_of_the_recipe_makes_a_stage_stale_or_is_known_to_be_harmless():
    def keys_of(value, prefix):
        if not isinstance(value, dict):
            return {prefix}
        return {key for name, field in value.items() for key in keys_of(field, f"{prefix}.{name}" if prefix else name)}

    keys = keys_of(Recipe(output_dir="", backbone={"source": ""}).model_dump(), "")
    depended_on = {key for stage_keys in STAGE_KEYS.values() for key in stage_keys}
    covered = {key for key in keys if key in depended_on or key.partition(".")[0] in depended_on}
    assert keys - covered == HARMLESS


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("marker", [None, "{torn"])
def test_a_folder_that_is_not_ours_is_refused_and_kept(tmp_path, marker, overwrite):
    folder = run_folder(tmp_path)
    folder.stage("train").mkdir()
    (folder.stage("train") / "thesis.txt").write_text("mine")
    if marker:
        (folder.stage("train") / "recipe.json").write_text(marker)
    before = content_of(folder)
    with pytest.raises(UserError, match="holds files that are no run of medusa-train"):
        folder.check(STAGES, overwrite)
    assert content_of(folder) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_place_of_a_stage_is_refused_and_kept(tmp_path, overwrite):
    folder = run_folder(tmp_path)
    folder.stage("train").write_text("mine")
    with pytest.raises(UserError, match="train"):
        folder.check(STAGES, overwrite)
    assert folder.stage("train").read_text() == "mine"


def test_an_unfinished_stage_is_continued(tmp_path):
    folder = run_folder(tmp_path)
    (folder.begin("distill") / "rows.jsonl").write_text("half")
    again = run_folder(tmp_path)
    again.check(STAGES, overwrite=False)
    assert not again.done("distill")
    assert (again.begin("distill") / "rows.jsonl").read_text() == "half"


def test_an_empty_stage_folder_is_free_to_use(tmp_path):
    folder = run_folder(tmp_path)
    folder.stage("prompts").mkdir()
    folder.check(STAGES, overwrite=False)
    assert not folder.done("prompts")


def test_the_result_of_an_unfinished_stage_says_what_to_run(tmp_path):
    folder = run_folder(tmp_path)
    folder.begin("distill")
    with pytest.raises(UserError, match="no finished distill stage; run medusa-train distill first"):
        folder.result("distill")


def test_a_finished_stage_records_the_recipe_and_the_content_of_its_inputs(finished):
    def recorded_hash():
        finished.finish("distill", time.time(), [finished.stage("prompts")], {})
        record = json.loads((finished.stage("distill") / "run.json").read_text())
        assert record["recipe"] == finished.recipe.model_dump()
        assert record["environment"]["medusa_train"]
        assert list(record["inputs"]) == ["prompts"]
        return record["inputs"]["prompts"]

    first = recorded_hash()
    finished.finish("prompts", time.time(), [], {"made": "at another time"})
    assert recorded_hash() == first  # when an input was made does not matter
    (finished.stage("prompts") / "output").write_text("other")
    assert recorded_hash() != first


def test_a_second_command_is_kept_out_until_the_first_ends(tmp_path):
    first, second = run_folder(tmp_path / "run"), run_folder(tmp_path / "run")
    with first.locked(), pytest.raises(UserError, match="another medusa-train works in"), second.locked():
        pass
    with pytest.raises(ZeroDivisionError), first.locked():
        raise ZeroDivisionError
    entered = []
    with second.locked():
        entered.append("after the first one's failure")
    assert entered


def test_a_folder_below_a_file_cannot_be_a_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "run"):
        with pytest.raises(UserError, match="cannot write to"), run_folder(place).locked():
            pass
    assert file.read_text() == "mine"


def test_more_epochs_reopen_training_and_keep_what_it_has(finished):
    key = "training.num_train_epochs"
    (finished.stage("train") / "checkpoint-3").mkdir()
    longer = run_folder(finished.path, key, 6)
    longer.check(STAGES, overwrite=False)
    assert (finished.stage("train") / "checkpoint-3").exists()
    assert not longer.done("train")
    assert longer.done("cache")
    assert not longer.stage("tree").exists()
    longer.check(STAGES, overwrite=False)  # and is then a run of that many
    for fewer in (run_folder(finished.path, key, 5), run_folder(finished.path, "training.learning_rate", 0.5)):
        with pytest.raises(UserError, match="was made with"):
            fewer.check(STAGES, overwrite=False)
