"""Recipes: what is accepted, what a mistake is told, and that every key is documented."""

from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest
import transformers
from pydantic import BaseModel

from medusa_train.inference import Tree, UserError
from medusa_train.recipe import Recipe, load_recipe, to_yaml

RECIPES = Path(str(files("medusa_train.recipes")))
MINIMAL = "output_dir: out\nbackbone:\n  source: model\n"


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def message_of(path, *overrides):
    """The one line that a refused recipe is told."""
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def leaf_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for section in sections:
            keys += leaf_keys(section, f"{prefix}{name}.")
        if not sections:
            keys.append(prefix + name)
    return keys


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("heads.num_head", "heads.num_heads"),
        ("data.max_new_token", "data.max_new_tokens"),
        ("training.lr_schedule_type", "training.lr_scheduler_type"),
        ("eval.draft_vocab_size", "heads.draft_vocab_size"),  # the right name in the wrong section
        ("trainning.learning_rate", "training"),
        ("lora.rank", "lora.r"),
        ("outputdir", "output_dir"),
    ],
)
def test_an_unknown_key_is_told_the_nearest_one(minimal, written, meant):
    message = message_of(minimal, f"{written}=1")
    unknown = written if written.partition(".")[0] in Recipe.model_fields else written.partition(".")[0]
    assert message.endswith(f"unknown key {unknown}; did you mean {meant}?")


def test_a_mistake_is_told_with_where_it_was_made(minimal):
    wrong = "heads.num_heads=three"
    for overrides in ((wrong,), ("training.learning_rate=0.1", "heads.num_heads=5", wrong)):
        assert message_of(minimal, *overrides).startswith(f"override {wrong!r}: heads.num_heads")
    assert message_of(minimal, "heads.num_head=1", "seed=1").startswith("override 'heads.num_head=1': unknown key")
    minimal.write_text(MINIMAL + "seed: many\n", encoding="utf-8")
    assert message_of(minimal, "heads.num_heads=5").startswith(f"recipe {minimal}: seed")


def test_an_unknown_key_that_resembles_none_is_told_so_without_a_guess(minimal):
    assert message_of(minimal, "zzz=1").endswith("unknown key zzz")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("heads.num_heads=three", ("heads.num_heads", "'three'")),
        ("heads.num_heads=0", ("heads.num_heads", "greater than or equal to 1", "0")),
        ("backbone.dtype=fp8", ("backbone.dtype", "'bfloat16'", "'fp8'")),
        ("training.learning_rate=-1", ("training.learning_rate", "greater than 0", "-1")),
        ("inference.tree_sizes=[8, big]", ("inference.tree_sizes.1", "'big'")),
        ("data=5", ("data", "5")),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_is_wanted(minimal, override, told):
    message = message_of(minimal, override)
    assert all(part in message for part in told), message


@pytest.mark.parametrize("missing", ["output_dir", "backbone.source", "backbone"])
def test_a_missing_key_is_named(tmp_path, missing):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        {
            "output_dir": "backbone:\n  source: model\n",
            "backbone.source": "output_dir: out\nbackbone:\n  dtype: auto\n",
            "backbone": "output_dir: out\n",
        }[missing]
    )
    assert message_of(path).endswith(f"recipe.yaml: {missing} is missing")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        (b"data: [1, 2", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"", "expected sections"),
        (b"- a\n- b\n", "expected sections"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, told):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    message = message_of(path)
    assert str(path) in message
    assert told in message


def test_a_folder_is_no_recipe(tmp_path):
    assert "Is a directory" in message_of(tmp_path)


def test_overrides_are_yaml_and_the_last_one_counts(minimal):
    recipe = load_recipe(
        minimal,
        [
            "heads.num_heads=7",
            "heads.num_heads=5",
            "training.learning_rate=3e-4",
            "data.num_prompts=null",
            "inference.tree_sizes=[1, 8]",
            "data.prompts=a=b.jsonl",
            "seed=4",
        ],
    )
    assert recipe.heads.num_heads == 5
    assert recipe.training.learning_rate == 3e-4
    assert recipe.data.num_prompts is None
    assert recipe.inference.tree_sizes == [1, 8]
    assert recipe.data.prompts == "a=b.jsonl"
    assert recipe.seed == 4
    assert recipe.data.max_new_tokens == Recipe(output_dir="", backbone={"source": ""}).data.max_new_tokens


def test_a_kernel_that_gives_no_position_its_loss_cannot_weigh_positions(minimal):
    overrides = ["training.use_liger_kernel=true", "training.weight_by_acceptance=true"]
    for one in overrides:
        load_recipe(minimal, [one])
    assert "leave out weight_by_acceptance" in message_of(minimal, *overrides)


def test_a_tree_is_given_as_paths_or_as_a_file_whose_paths_the_recipe_keeps(minimal, tmp_path):
    assert load_recipe(minimal, ["inference.tree=[[0], [0, 0], [12]]"]).inference.tree == [[0], [0, 0], [12]]
    file = tmp_path / "tree.json"
    Tree.from_paths([[1], [0, 2]]).save(file)
    recipe = load_recipe(minimal, [f"inference.tree={file}"])
    file.unlink()
    assert recipe.inference.tree == [[0], [1], [0, 2]]
    assert "tree: null" in to_yaml(load_recipe(minimal))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("[[0, 0, 0, 0]]", "it is 4 deep, but there are 3 heads"),
        ("[[0], [0, 4096]]", "rank 4096 at depth 2, but head 2 has 4096 tokens"),
        ("[[0, -1]]", "whole numbers from 0"),
        ("[[0, x]]", "inference.tree.0.1"),
        ("[0, 1]", "inference.tree.0"),
        ("nowhere.json", "nowhere.json: no such file"),
    ],
)
def test_a_tree_that_the_heads_could_not_fill_is_refused_before_any_work(minimal, value, told):
    assert told in message_of(minimal, f"inference.tree={value}")


@pytest.mark.parametrize("override", ["heads.num_heads", "=3", "output_dir.inner=3", "data.prompts=[1"])
def test_a_malformed_override_is_quoted(minimal, override):
    assert repr(override) in message_of(minimal, override)


@pytest.mark.parametrize(
    "path", sorted(set(RECIPES.rglob("*.yaml")) - set(RECIPES.glob("accelerate/*"))), ids=lambda path: path.name
)
def test_shipped_recipes_load(path):
    assert load_recipe(path).backbone.source


def test_the_quickstart_recipe_is_shipped_and_needs_no_prompt_file():
    recipe = load_recipe(RECIPES / "quickstart.yaml")
    assert recipe.data.prompts == "synthesize"
    assert recipe.output_dir == "runs/quickstart"


def test_the_printed_recipe_is_the_recipe(minimal, tmp_path):
    recipe = load_recipe(
        minimal,
        [
            "data.prompts='Grüße: #1.jsonl'", "training.learning_rate=1e-5", "heads.num_heads=2",
            "training.mode=online", "lora={}",
        ],
    )  # fmt: skip
    printed = tmp_path / "printed.yaml"
    printed.write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(printed) == recipe
    assert recipe.data.prompts in to_yaml(recipe)  # as people write it, not escaped
    assert all(f"{key.rpartition('.')[2]}:" in to_yaml(recipe) for key in leaf_keys(Recipe))


@pytest.mark.parametrize("key", leaf_keys(Recipe))
def test_every_key_is_documented(key):
    assert f"`{key}`" in (RECIPES / "README.md").read_text(encoding="utf-8")


def test_an_unknown_schedule_a_bare_section_and_a_misplaced_recipe_are_named_at_once():
    with pytest.raises(UserError, match="'constant_with_warmup'"):
        load_recipe(RECIPES / "quickstart.yaml", ["training.lr_scheduler_type=cosin"])
    with pytest.raises(UserError, match="heads: a section of keys is expected, got 3"):
        load_recipe(RECIPES / "quickstart.yaml", ["heads=3"])
    with pytest.raises(UserError, match="a recipe goes behind --recipe"):
        load_recipe(RECIPES / "quickstart.yaml", ["mine.yaml"])


def test_every_schedule_is_one_of_transformers():
    names = {name.value for name in transformers.SchedulerType}
    assert (
        set(get_args(Recipe.model_fields["training"].annotation.model_fields["lr_scheduler_type"].annotation)) <= names
    )


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("{}", "data.backend=openai needs data.server.urls"),
        ("{urls: [gpu1:8000/v1]}", "begins with http:// or https://"),
        ("{urls: ['http://me:secret@gpu1:8000/v1']}", "carry no key; set MEDUSA_API_KEY"),
        ("{urls: ['http://gpu1:8000/v1?key=secret']}", "carry no key; set MEDUSA_API_KEY"),
    ],
)
def test_servers_are_named_and_hold_no_secret(minimal, server, told):
    message = message_of(minimal, "data.backend=openai", f"data.server={server}").lower()
    assert told.lower() in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["heads.reads_copies=true", "heads.num_heads=6"], "copies are 5 tokens long; use fewer heads"),
        (["heads.kind=hydra", "heads.num_layers=0"], "num_layers must be at least 1 for hydra heads"),
        (["heads.reads_copies=true", "heads.num_layers=0"], "num_layers must be at least 1 for heads that read copies"),
        (["heads.lm_head=shared", "heads.num_layers=0"], "num_layers must be at least 1 with a shared lm_head"),
    ],
)
def test_heads_that_cannot_be_are_refused_before_anything_is_made(minimal, overrides, told):
    assert told in message_of(minimal, *overrides)
