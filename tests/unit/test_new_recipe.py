"""`medusa-train recipe`: what it writes loads, suits the model, explains itself, and replaces nothing."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conftest import assert_refused
from medusa_train.estimate import Shape
from medusa_train.new_recipe import TOUCHED, choose, recipe_text
from medusa_train.recipe import Recipe, load_recipe
from medusa_train.recipe_reference import meaning, schema_json, section_of


def written(source, chosen):
    return yaml.safe_load(recipe_text(source, chosen, ["for a test"]))


@settings(max_examples=40)
@given(
    st.builds(
        Shape, parameters=st.just(1), num_layers=st.just(1), hidden_size=st.integers(8, 16384),
        vocab_size=st.integers(2, 300_000), cache_width=st.just(1),
        max_positions=st.none() | st.integers(2, 200_000),
    ),
    st.sampled_from(["medusa", "hydra", "recurrent"]),
)  # fmt: skip
def test_a_model_of_any_size_gets_a_recipe_that_loads(shape, kind):
    recipe = Recipe.model_validate(written("org/model", choose(shape, kind)))
    assert recipe.heads.kind == kind
    assert recipe.heads.reads_copies == (kind != "medusa")
    assert recipe.heads.draft_vocab_size <= shape.vocab_size
    assert recipe.data.max_new_tokens <= (shape.max_positions or 512)
    if recipe.training.mode == "online":
        assert recipe.training.per_device_train_batch_size == 1


@settings(max_examples=25, deadline=None)
@example("a folder with spaces " * 9)
@example("\x85")
@given(st.text(min_size=1))
def test_any_source_is_written_as_it_is(source):
    assert written(source, {})["backbone"]["source"] == source
    if source.isprintable():  # a name with a line break in it may take more lines
        assert recipe_text(source, {}, []).count("\n") == recipe_text("m", {}, []).count("\n")  # never folded


def test_without_a_choice_every_value_is_the_default():
    content = written("org/model", {})
    assert Recipe.model_validate(content) == Recipe(output_dir="runs/model", backbone={"source": "org/model"})


def test_every_key_is_explained_by_its_docstring():
    text = recipe_text("org/model", {}, [])
    for name, keys in TOUCHED.items():
        for key in keys:
            explained = f"  # {meaning(section_of(Recipe.model_fields[name]).model_fields[key])}\n  {key}: "
            assert explained in text


def test_more_data_is_asked_for_by_wider_models_and_online_training_by_the_widest():
    def chosen(width):
        return written("m", choose(Shape(1, 1, width, 50_000, 1, 8192), "medusa"))

    prompts = [chosen(width)["data"]["num_prompts"] for width in (64, 576, 2048, 16384)]
    assert prompts == [300, 1300, 16400, 40000]
    assert [chosen(width)["training"]["mode"] for width in (4096, 16384)] == ["cached", "online"]


def test_a_recipe_for_a_folder_suits_its_config(command, tiny_chat_folder, tmp_path):
    path = tmp_path / "mine" / "new.yaml"
    code, out, error = command("recipe", "new", "--model", tiny_chat_folder, "--kind", "hydra", "--out", path)
    assert (code, error) == (0, "")
    assert str(path) in out
    recipe = load_recipe(path)
    assert (recipe.backbone.source, recipe.heads.kind) == (str(tiny_chat_folder), "hydra")
    assert recipe.heads.draft_vocab_size == 0  # of a vocabulary of 512
    assert recipe.data.max_new_tokens == 128  # of 256 positions
    assert "hidden size 32" in path.read_text()
    schema = path.read_text().splitlines()[0].partition("$schema=")[2]
    assert Path(schema).read_text() == schema_json()
    assert command("prompts", path, "--plan")[0] == 0


def test_a_model_that_recipes_exist_for_is_known_offline(command):
    code, out, _ = command("recipe", "new", "--model", "Qwen/Qwen3-8B")
    assert code == 0
    assert yaml.safe_load(out)["heads"]["draft_vocab_size"] == 8192


def test_a_model_that_nothing_is_known_of_gets_defaults_and_is_told_so(command):
    code, out, _ = command("recipe", "new", "--model", "someone/else")
    assert code == 0
    assert yaml.safe_load(out)["data"]["num_prompts"] == 640
    assert "no config of the model" in out


def test_a_file_that_is_there_is_kept(command, tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    outcome = command("recipe", "new", "--model", "Qwen/Qwen3-8B", "--out", tmp_path / "mine.yaml")
    assert_refused(outcome, "mine.yaml is there already")
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "no such folder"),
        ({}, "cannot read the config of backbone"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "vit"}, "cannot read the config of backbone"),
    ],
)
def test_what_is_no_language_model_is_refused_and_nothing_is_written(command, tmp_path, config, told):
    folder = tmp_path / "model"
    if config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    outcome = command("recipe", "new", "--model", folder, "--out", tmp_path / "new.yaml")
    assert_refused(outcome, told)
    assert not (tmp_path / "new.yaml").exists()


def test_code_of_a_model_is_not_run(command, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert_refused(command("recipe", "new", "--model", folder), "cannot read the config")
    assert not (tmp_path / "ran").exists()


def test_the_schema_is_printed_as_it_is_shipped(command):
    code, out, _ = command("recipe", "schema")
    assert (code, out) == (0, schema_json())
    assert json.loads(out)["properties"]["training"]
