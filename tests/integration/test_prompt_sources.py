"""`medusa-train prompts` and `distill` on prompts of several sources: what is taken, left out and told."""

import json
from collections import Counter

import pytest
import yaml
from datasets import Dataset

from conftest import assert_refused
from medusa_train.data import synthesis
from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.rows import read_prompts, read_rows
from medusa_train.inference import UserError, load_backbone
from medusa_train.recipe import load_recipe


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def recipe(tmp_path, tiny_chat_folder):
    """A recipe of two sources, the first with twice the weight."""
    first = write(tmp_path / "first.jsonl", [{"query": f"the cat {i} ?"} for i in range(40)])
    second = write(tmp_path / "second.jsonl", [{"turns": [f"what is {i} ?", f"and {i} ?"]} for i in range(40)])
    content = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": [{"path": first, "columns": {"prompt": "query"}, "weight": 2}, second],
            "num_prompts": 30, "max_new_tokens": 4, "calibration_share": 0.3, "heldout_share": 0.3,
        },
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_sources_are_mixed_by_weight_and_several_turns_are_answered_in_turn(command, recipe, tmp_path):
    code, _, error = command("distill", recipe)
    assert code == 0, error
    prompts = read_prompts(tmp_path / "run" / "prompts" / "prompts.jsonl")
    assert Counter(len(prompt.follow_ups) for prompt in prompts) == {0: 20, 1: 10}
    rows = {row.id: row for row in read_rows(tmp_path / "run" / "distill" / "rows.jsonl")}
    assert rows.keys() == {prompt.id for prompt in prompts}
    assert {len(rows[prompt.id].spans) for prompt in prompts if not prompt.follow_ups} == {1}


def test_bad_records_stop_the_run_or_are_told_and_recorded(command, recipe, tmp_path):
    bad = [{"prompt": "the <|im_end|> cat"}, {"prompt": " "}, {"prompt": "the mat"}, {"prompt": "The  mat"}]
    path = write(tmp_path / "bad.jsonl", bad)
    words = [f"data.prompts={path}", "data.num_prompts=null"]
    assert_refused(command("prompts", recipe, *words), "bad.jsonl line 1: the special token <|im_end|> is written as")
    code, out, error = command("prompts", recipe, *words, "data.on_bad_rows=skip")
    assert code == 0, error
    assert (
        "records left out: 1 (the special token <|im_end|> is written as text in a message), 1 (an empty turn)" in out
    )
    made = json.loads((tmp_path / "run" / "prompts" / "run.json").read_text())["result"]
    assert made["prompts"] == 1
    assert made["left_out"] == 3
    assert ["the same prompt again", 1] in made["reasons"]


def test_the_same_recipe_takes_the_same_prompts_and_another_seed_takes_others(command, recipe, tmp_path):
    taken = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert command("prompts", recipe, "--out", name, "--seed", seed)[0] == 0
        taken.append((tmp_path / name / "prompts" / "prompts.jsonl").read_text())
    assert taken[0] == taken[1] != taken[2]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.prompts=[]", "data.prompts and data.conversations: name one source at least"),
        ("data.num_prompts=null", "weights share out data.num_prompts, which is null"),
        ("data.prompts=[{path: a, wieght: 2}]", "wieght"),
    ],
)
def test_sources_that_make_no_sense_are_refused(recipe, word, told):
    with pytest.raises(UserError, match=told):
        load_recipe(recipe, [word])


def test_one_source_may_stand_alone(recipe):
    given = load_recipe(recipe, ["data.prompts={path: a.csv, split: test}"]).data.sources("prompts")
    assert [(source.path, source.split, source.weight) for source in given] == [("a.csv", "test", 1)]
    named = load_recipe(recipe, ["data.prompts=a/b", "data.prompts_split=test"]).data.sources("prompts")
    assert [(source.path, source.split) for source in named] == [("a/b", "test")]


# Beside the backbone's own


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.prompts=[a.jsonl, synthesize]", "data.num_prompts=null"],
         "data.prompts: synthesize writes a share of data.num_prompts, which is null; give a number"),
        (["data.prompts=[synthesize, {path: synthesize, weight: 2}]"], "names synthesize more than once"),
        (["data.prompts=[a.jsonl, {path: synthesize, split: test}]"], "a weight, but no split and no columns"),
        (["data.prompts=[a.jsonl, {path: synthesize, columns: {prompt: a}}]"], "a weight, but no split and no columns"),
        (["data.conversations=synthesize"], "synthesize writes prompts, not conversations"),
        (["data.conversations=[a.jsonl, synthesize]"], "synthesize writes prompts, not conversations"),
    ],
)  # fmt: skip
def test_synthesis_that_makes_no_sense_is_refused(command, recipe, words, told):
    assert_refused(command("prompts", recipe, *words), told)


def test_the_backbones_share_is_by_weight(recipe):
    def shares(*words):
        section = load_recipe(recipe, list(words)).data
        return section.synthesized, [source.path for source in section.sources("prompts")]

    assert shares("data.prompts=[a, {path: synthesize, weight: 2}, b]", "data.num_prompts=40") == (20, ["a", "b"])
    assert shares("data.prompts=[a, synthesize, b]", "data.num_prompts=10") == (3, ["a", "b"])
    assert shares("data.prompts=[synthesize]", "data.num_prompts=7") == (7, [])
    assert shares("data.prompts=synthesize", "data.num_prompts=7") == (7, [])
    assert shares("data.prompts=[a, b]", "data.num_prompts=7") == (0, ["a", "b"])
    assert shares("data.prompts=./synthesize") == (0, ["./synthesize"])


def mixed(tmp_path, recipe, *words):
    """Words for a recipe of 20 prompts of the first source, 10 of the second, and 15 that the backbone writes."""
    sources = [{"path": str(tmp_path / "first.jsonl"), "columns": {"prompt": "query"}, "weight": 4}]
    sources += [{"path": "synthesize", "weight": 3}, {"path": str(tmp_path / "second.jsonl"), "weight": 2}]
    return [recipe, f"data.prompts={json.dumps(sources)}", "data.num_prompts=45", "data.batch_size=4", *words]


def kinds_of(path):
    def kind(prompt):
        if prompt.follow_ups:
            return "second"
        return "written" if prompt.messages[0]["content"].startswith("the cat sat") else "first"

    return Counter(kind(prompt) for prompt in read_prompts(path))


def test_the_backbone_writes_beside_files_by_weight_and_about_the_topics(openings, command, recipe, tmp_path):
    code, out, error = command("prompts", *mixed(tmp_path, recipe, "data.prompt_topics=[cats, mats]"))
    assert code == 0, error
    assert "asks about this: cats" in openings[0]
    assert "asks about this: mats" in openings[1]
    path = tmp_path / "run" / "prompts" / "prompts.jsonl"
    prompts = read_prompts(path)
    assert len({prompt.id for prompt in prompts}) == 45
    assert kinds_of(path)["second"] == 10
    made = json.loads((tmp_path / "run" / "prompts" / "run.json").read_text())["result"]
    assert made["prompts"] == 45
    assert made["synthesized"] == 15
    assert made["source"] == f"{tmp_path / 'first.jsonl'}, {tmp_path / 'second.jsonl'}, synthesize"
    assert "synthesized 15" in out
    own = {prompt.id for prompt in read_prompts(path.with_name("synthesized.jsonl"))}
    assert own == {prompt.id for prompt in prompts[-15:]}

    assert command("prompts", *mixed(tmp_path, recipe, "data.prompt_topics=[cats, mats]"), "--out", "again")[0] == 0
    assert len(openings) > 2


def test_a_prompt_that_a_file_holds_is_not_written_again(openings, command, recipe, tmp_path):
    held = write(tmp_path / "held.jsonl", [{"prompt": "The cat  on 0 ?"}, {"prompt": "the mat ?"}])
    words = [f"data.prompts=[{held}, synthesize]", "data.num_prompts=4", "data.batch_size=4"]
    code, _, error = command("prompts", recipe, *words)
    assert code == 0, error
    texts = [prompt.messages[0]["content"] for prompt in read_prompts(tmp_path / "run" / "prompts" / "prompts.jsonl")]
    assert sorted(texts[:2]) == ["The cat  on 0 ?", "the mat ?"]
    assert len(texts) == 4
    assert "the cat on 0 ?" not in texts


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_killed_mixture_goes_on_as_if_unbroken(deterministic, command, recipe, tmp_path, share):
    words = mixed(tmp_path, recipe)
    assert command("prompts", *words, "--out", "unbroken")[0] == 0
    folder = tmp_path / "unbroken" / "prompts"
    whole = (folder / "prompts.jsonl").read_bytes()
    own = (folder / "synthesized.jsonl").read_bytes()
    calls = len(deterministic)
    # As a kill leaves it: the files' prompts half written, or those of the backbone torn.
    (folder / "run.json").unlink()
    (folder / "prompts.jsonl").write_bytes(whole[: int(share * len(whole))])
    (folder / "synthesized.jsonl").write_bytes(own[: int(share * len(own))])
    code, _, error = command("prompts", *words, "--out", "unbroken")
    assert code == 0, error
    assert (folder / "prompts.jsonl").read_bytes() == whole
    assert (folder / "synthesized.jsonl").read_bytes() == own
    assert share < 0.5 or len(deterministic) - calls < calls


def test_a_bad_file_is_told_before_the_backbone_writes(openings, command, recipe, tmp_path):
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "the cat"}, {"prompt": " "}])
    outcome = command("prompts", recipe, f"data.prompts=[synthesize, {bad}]", "data.num_prompts=4")
    assert_refused(outcome, "bad.jsonl line 2: an empty turn")
    assert openings == []


def test_something_that_has_the_name_of_synthesis_is_told_and_can_be_read(openings, command, recipe, tmp_path):
    words = ["data.num_prompts=2", "data.batch_size=4"]
    assert "./synthesize" not in command("prompts", recipe, *words, "data.prompts=synthesize", "--out", "none")[1]
    Dataset.from_list([{"prompt": "of the folder"}]).save_to_disk(tmp_path / "synthesize")
    for given in ("synthesize", f"[{tmp_path / 'second.jsonl'}, synthesize]"):
        code, out, error = command("prompts", recipe, *words, f"data.prompts={given}", "--out", f"own-{len(given)}")
        assert code == 0, error
        assert "name it ./synthesize" in out
    code, out, error = command("prompts", recipe, *words, "data.prompts=[./synthesize]", "--out", "read")
    assert code == 0, error
    assert "name it" not in out
    [prompt] = read_prompts(tmp_path / "read" / "prompts" / "prompts.jsonl")
    assert prompt.messages[0]["content"] == "of the folder"


# Topics


@pytest.fixture
def deterministic(monkeypatch, tiny_chat_folder):
    """Seeds that turns were drawn with; turns are words that follow from the seed alone."""
    tokenizer, seeds = load_chat_tokenizer(str(tiny_chat_folder)), []

    def generate(backbone, prompts, *arguments, seed, **options):
        seeds.append(seed)
        texts = [f"the cat {'sat ' * (seed % 9)}on {'mat ' * i}{seed} ?" for i in range(len(prompts))]
        return [tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"] for text in texts]

    monkeypatch.setattr(synthesis, "generate_batch", generate)
    return seeds


@pytest.fixture
def openings(monkeypatch, tiny_chat_folder):
    """What every turn was written behind; each turn is some words that were not there before."""
    tokenizer, seen = load_chat_tokenizer(str(tiny_chat_folder)), []

    def generate(backbone, prompts, *arguments, **options):
        first = len(seen)
        seen.extend(tokenizer.decode(ids) for ids in prompts)
        texts = [f"the cat {'sat ' * (i % 9)}on {'mat ' * (i % 7)}{i} ?" for i in range(first, len(seen))]
        return [tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"] for text in texts]

    monkeypatch.setattr(synthesis, "generate_batch", generate)
    return seen


def test_turns_are_about_the_topics_in_rotation_and_the_topic_is_not_kept(openings, command, recipe, tmp_path):
    (tmp_path / "topics.txt").write_text("cats\n\n mats \n")
    words = ["data.prompts=synthesize", "data.num_prompts=8", "data.batch_size=4"]
    code, _, error = command("prompts", recipe, *words, "data.prompt_topics=topics.txt")
    assert code == 0, error
    assert "asks about this: cats<|im_end|>\n<|im_start|>user\n" in openings[0]
    assert "asks about this: mats<|im_end|>" in openings[1]
    assert openings[2] == openings[0]
    prompts = read_prompts(tmp_path / "run" / "prompts" / "prompts.jsonl")
    assert [[message["role"] for message in prompt.messages] for prompt in prompts] == [["user"]] * 8

    code, _, error = command("prompts", recipe, *words, "data.prompt_topics=[dogs]", "--out", "other")
    assert code == 0, error
    assert "asks about this: dogs" in openings[-1]


def test_topics_that_cannot_be_read_are_named(command, recipe, tmp_path):
    (tmp_path / "blank.txt").write_text("\n")
    words = ["data.prompts=synthesize", "data.num_prompts=8"]
    assert_refused(command("prompts", recipe, *words, "data.prompt_topics=none.txt"), "data.prompt_topics=none.txt")
    assert_refused(command("prompts", recipe, *words, "data.prompt_topics=blank.txt"), "the file holds no topic")


def test_a_template_without_a_place_for_topics_is_told(tiny_chat_folder, tmp_path):
    tokenizer = load_chat_tokenizer(str(tiny_chat_folder))
    tokenizer.chat_template = "<|im_start|>{{ messages[-1]['content'] }}<|im_end|>"
    backbone = load_backbone(str(tiny_chat_folder), dtype="float32", device="cpu")
    with pytest.raises(UserError, match=r"no place for data\.prompt_topics"):
        synthesis.synthesize_prompts(backbone, tokenizer, tmp_path / "p.jsonl", 4, 8, 1.0, 0, 4, 0, ["cats"])


def test_near_repetitions_and_fragments_are_not_kept(monkeypatch, tiny_chat_folder, tmp_path):
    tokenizer = load_chat_tokenizer(str(tiny_chat_folder))
    backbone = load_backbone(str(tiny_chat_folder), dtype="float32", device="cpu")
    written = [
        "what is the cat on the mat ?",
        "what is the cat on the mat",
        "the cat sat on the",
        "is that a mat of mine ?",
    ]
    ids = [tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"] for text in written]
    monkeypatch.setattr(synthesis, "generate_batch", lambda *arguments, **options: ids)
    path = tmp_path / "prompts.jsonl"
    synthesis.synthesize_prompts(backbone, tokenizer, path, 2, 8, 1.0, 0, 4, 0)
    assert [prompt.messages[0]["content"] for prompt in read_prompts(path)] == [written[0], written[3]]
