"""The command line: what it prints, how it fails, and that a mistake leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import yaml

import medusa_train
from conftest import assert_refused
from medusa_train.cli import main
from medusa_train.recipe import load_recipe


def medusa(*arguments, cwd=None):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "medusa_train.cli", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "NO_COLOR": "1"},
        check=False,
    )


def content_of(folder):
    """Every file below a folder; the lock of a run says nothing about it."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} | {
        path.relative_to(folder): None for path in folder.rglob("*") if path.is_dir()
    }


def written(folder):
    """What a command wrote below a run's folder, apart from its lock."""
    return [path for path in content_of(folder) if path.name != ".lock"] if folder.exists() else []


@pytest.fixture
def recipe(tmp_path, tiny_chat_folder):
    """A recipe for the tiny model whose prompts come from a file."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is this ?"}\n{"prompt": "and the cat ?"}\n')
    content = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"draft_vocab_size": 0},
        "data": {"prompts": str(tmp_path / "prompts.jsonl")},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def outcome_of(process):
    return process.returncode, process.stdout, process.stderr


# What needs no model


def test_the_command_is_installed():
    (entry,) = entry_points(group="console_scripts", name="medusa-train")
    assert entry.load() is main


def test_help_lists_the_stages_in_their_order():
    process = medusa("--help")
    assert process.returncode == 0
    names = ["prompts", "distill", "cache", "train", "tree", "eval", "quickstart", "generate", "chat"]
    listed = [words[1] for words in map(str.split, process.stdout.splitlines()) if len(words) > 2 and words[0] == "│"]
    assert [name for name in listed if name in names] == names
    assert process.stderr == ""


@pytest.mark.parametrize("name", ["distill", "quickstart", "generate"])
def test_every_command_has_help(name):
    process = medusa(name, "--help")
    assert process.returncode == 0
    assert "Usage:" in process.stdout


def test_version():
    assert outcome_of(medusa("--version")) == (0, f"{medusa_train.__version__}\n", "")


@pytest.mark.parametrize("name", ["prompts", "distill", "cache", "train", "tree", "eval"])
def test_plan_prints_the_resolved_recipe_and_writes_nothing(command, recipe, tmp_path, name):
    before = content_of(tmp_path)
    code, out, error = command(name, recipe, "heads.num_heads=2", "--seed", 5, "--plan")
    assert (code, error) == (0, "")
    assert yaml.safe_load(out) == load_recipe(recipe, ["heads.num_heads=2", "seed=5"]).model_dump()
    assert content_of(tmp_path) == before


def test_quickstart_plan_needs_no_recipe(tmp_path):
    process = medusa("quickstart", "--plan", "--out", "elsewhere", cwd=tmp_path)
    assert process.returncode == 0
    assert yaml.safe_load(process.stdout)["output_dir"] == "elsewhere"
    assert content_of(tmp_path) == {}


@pytest.mark.parametrize("folder", ["2024", "1e3", "yes", "a: b", "run #1"])
def test_out_is_a_path_whatever_it_looks_like(command, recipe, folder):
    code, out, error = command("prompts", recipe, "--out", folder, "--plan")
    assert code == 0, error
    assert yaml.safe_load(out)["output_dir"] == folder


def test_importing_the_command_line_imports_no_torch():
    program = (
        "import sys, medusa_train, medusa_train.cli, medusa_train.recipe\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'accelerate'} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


# Mistakes


def test_an_unknown_key_is_refused(recipe, tmp_path):
    outcome = outcome_of(medusa("distill", recipe, "data.max_new_token=5"))
    assert_refused(outcome, "unknown key data.max_new_token", "did you mean data.max_new_tokens?")
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_is_refused(tmp_path):
    assert_refused(outcome_of(medusa("train", "none.yaml", cwd=tmp_path)), "none.yaml", "No such file")
    assert content_of(tmp_path) == {}


def test_the_training_entry_for_launchers_refuses_in_the_same_way(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "medusa_train.train", "none.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert_refused(outcome_of(process), "none.yaml", "No such file")
    assert content_of(tmp_path) == {}


def test_an_empty_prompt_file_is_refused(command, recipe, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("")
    assert_refused(command("prompts", recipe), "prompts.jsonl", "is empty")
    assert written(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cost", "runs/mine", "--price", "dear", "--bandwidth", 3], ["Invalid value for '--price'", "cost --help"]),
        (["eval"], ["Missing argument 'recipe'", "see medusa-train eval --help"]),
        (["bench", "--prompts"], ["'--prompts' requires an argument"]),
        (["evaluate"], ["No such command 'evaluate'"]),
        (["--twice"], ["No such option: --twice"]),
        (["recipe", "new"], ["Missing option '--model'", "recipe new --help"]),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(command, words, told):
    assert_refused(command(*words), *told)


def test_a_command_without_words_shows_its_help_alone(command):
    code, shown, error = command("data")
    assert code == 2
    assert "Usage: medusa-train data" in shown + error
    assert "medusa-train: " not in error


def test_a_corrected_mistake_needs_no_overwrite(command, recipe, tmp_path):
    assert_refused(command("prompts", recipe, "data.prompts=prompt.jsonl"), "no such file")
    code, _, error = command("prompts", recipe)
    assert code == 0, error
    assert (tmp_path / "run" / "prompts" / "run.json").exists()


def test_a_missing_backbone_folder_is_refused_without_noise_of_libraries(recipe, tmp_path):
    outcome = outcome_of(medusa("prompts", recipe, "backbone.source=./none", "data.prompts=synthesize"))
    assert_refused(outcome, "backbone ./none: no such folder")
    assert written(tmp_path / "run") == []


def test_a_missing_backbone_folder_is_refused_before_prompts_are_read(command, recipe, tmp_path):
    assert_refused(command("prompts", recipe, "backbone.source=./none"), "backbone ./none: no such folder")
    assert written(tmp_path / "run") == []


def test_a_model_without_chat_template_is_refused(command, recipe, tiny_chat_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_chat_folder, bare)
    (bare / "chat_template.jinja").unlink()
    outcome = command("prompts", recipe, f"backbone.source={bare}", "data.prompts=synthesize")
    assert_refused(outcome, "has no chat template", "backbone.chat_template=FILE")
    assert written(tmp_path / "run") == []


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_missing_heads_are_refused(command, tmp_path, name):
    words = ["--prompt", "hello"] if name == "generate" else []
    assert_refused(command(name, "./none", *words), "heads ./none: no such folder")


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_a_wrong_drafter_is_refused_before_heads_are_loaded(command, name):
    words = ["--prompt", "hello"] if name == "generate" else []
    assert_refused(command(name, "./none", "--drafter", "medusas", *words), "no drafter 'medusas'", "medusa-lookup")


def test_a_folder_without_heads_is_refused(command, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(command("generate", "./empty", "--prompt", "hello"), "empty", "no config.json")


def test_a_command_makes_what_it_needs_until_something_is_wrong(command, recipe, tmp_path):
    code, out, told = command("eval", recipe, "data.max_new_tokens=8")
    assert code == 2
    assert "prompts: prompts 2" in out
    assert "no row fell into the" in told  # two prompts for three splits
    assert not (tmp_path / "run" / "cache").exists()


def test_a_run_of_another_recipe_is_refused_and_kept(command, recipe, tmp_path):
    assert command("prompts", recipe)[0] == 0
    before = content_of(tmp_path)
    outcome = command("prompts", recipe, "data.num_prompts=1")
    assert_refused(outcome, "was made with data.num_prompts=640, the recipe says 1", "--overwrite")
    assert content_of(tmp_path) == before


def test_overwrite_makes_a_run_of_another_recipe_anew(command, recipe, tmp_path):
    assert command("prompts", recipe)[0] == 0
    assert command("prompts", recipe, "data.num_prompts=1", "--overwrite")[0] == 0
    assert len((tmp_path / "run" / "prompts" / "prompts.jsonl").read_text().splitlines()) == 1


def test_a_finished_stage_is_kept(command, recipe, tmp_path):
    assert command("prompts", recipe)[0] == 0
    before = content_of(tmp_path)
    code, out, _ = command("prompts", recipe)
    assert code == 0
    assert "prompts: done, kept" in out
    assert content_of(tmp_path) == before


def test_an_output_folder_that_cannot_be_made_is_refused(command, recipe, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    assert_refused(command("prompts", recipe, "--out", file / "run"), f"cannot write to {file / 'run'}", "--out")
    assert file.read_text() == "mine"


def test_debug_shows_where_a_mistake_was_found(recipe):
    process = medusa("train", recipe, "data.max_new_token=5", "--debug")
    assert process.returncode != 0
    assert "Traceback" in process.stderr
    assert "unknown key data.max_new_token" in process.stderr


# A run from the command line


def test_prompts_from_a_file_are_written_with_how_they_were_made(command, recipe, tmp_path):
    code, out, _ = command("prompts", recipe)
    assert code == 0
    assert "prompts: prompts 2" in out
    lines = (tmp_path / "run" / "prompts" / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"][0]["content"] for line in lines] == ["what is this ?", "and the cat ?"]
    record = json.loads((tmp_path / "run" / "prompts" / "run.json").read_text())
    assert record["result"]["prompts"] == 2
    assert record["recipe"] == load_recipe(recipe).model_dump()
