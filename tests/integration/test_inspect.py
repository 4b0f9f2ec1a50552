"""`medusa-train data inspect`: runs, rows and chats, on a terminal and as a page."""

import json

import pytest
import yaml

from conftest import assert_refused
from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.generation import generate_batch
from medusa_train.data.rows import Row, append_jsonl
from medusa_train.eval.self_consistency import self_consistency
from medusa_train.inference import load_backbone
from medusa_train.recipe import load_recipe
from medusa_train.run_folder import RunFolder


@pytest.fixture
def recipe(tmp_path, tiny_chat_folder):
    path = tmp_path / "recipe.yaml"
    backbone = {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"}
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "run"), "backbone": backbone}))
    return path


@pytest.fixture
def run(recipe, tiny_chat_folder):
    """The folder of a run with a few rows, the first with markup in its prompt."""
    tokenizer = load_chat_tokenizer(str(tiny_chat_folder))
    rows = []
    for i, split in enumerate(["train", "calibration", "heldout", "train"]):
        prompt = tokenizer(f"<script>{i % 3}</script>", add_special_tokens=False)["input_ids"]
        answer = tokenizer("the cat sat<|im_end|>", add_special_tokens=False)["input_ids"]
        span = (len(prompt), len(prompt) + len(answer))
        rows.append(Row(f"{i:016x}", split, [], prompt + answer, [span], "stop" if i else "length"))
    folder = RunFolder(load_recipe(recipe))
    append_jsonl(folder.begin("distill") / "rows.jsonl", rows)
    return folder.path


def test_a_run_its_recipe_and_its_rows_are_shown_alike(command, recipe, run):
    outputs = []
    for target in (run, recipe, run / "distill", run / "distill" / "rows.jsonl"):
        code, out, error = command("data", "inspect", target, "--rows", 1)
        assert code == 0, error
        outputs.append(out)
    assert len(set(outputs)) == 1
    assert "4: train 2, calibration 1, heldout 1" in outputs[0]
    assert "stop 3, length 1" in outputs[0]
    assert "1 rows, 3 answers" in outputs[0]
    assert "<script>0</script>[[the cat sat<|im_end|>]]" in outputs[0]
    assert "\x1b" not in outputs[0]
    assert "256" in outputs[0]
    assert "100.00%" in outputs[0]


def test_a_file_of_chats_is_shown_as_a_backbone_would_learn_it(command, tiny_chat_folder, tmp_path):
    path = tmp_path / "chats.jsonl"
    said = [{"from": "human", "value": "what is this ?"}, {"from": "gpt", "value": "the cat"}]
    path.write_text(json.dumps({"conversations": said}) + '\n{"prompt": "the mat"}\nno JSON\n')
    code, out, error = command("data", "inspect", path, "--backbone", tiny_chat_folder)
    assert code == 0, error
    assert "<|im_start|>assistant\n[[the cat<|im_end|>]]\n" in out
    assert "1 (no turn of an assistant), 1 (a line that is not JSON)" in out
    assert "given 1" in out


def test_the_page_stands_alone_and_shows_text_as_text(command, run, tmp_path):
    code, _, error = command("data", "inspect", run, "--rows", 2, "--html", tmp_path / "page.html")
    assert code == 0, error
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;0&lt;/script&gt;<span>the cat sat&lt;|im_end|&gt;</span>" in page
    assert page.count('<div class="row">') == 2
    assert "http" not in page


def test_greedy_answers_are_self_consistent_and_others_are_not(command, run, tiny_chat_folder):
    backbone = load_backbone(str(tiny_chat_folder), dtype="float32", device="cpu")
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [30]]
    answers = generate_batch(backbone, prompts, 12, backbone.eos_token_ids)
    rows = [
        Row(str(i), "train", [], prompt + answer, [(len(prompt), len(prompt) + len(answer))], "stop")
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    assert self_consistency(backbone, rows) == [(len(answer), len(answer)) for answer in answers]
    other = Row("x", "train", [], [*rows[0].input_ids[:-1], (rows[0].input_ids[-1] + 1) % 512], rows[0].spans, "stop")
    whole = Row("y", "train", [], rows[2].input_ids, [(0, len(rows[2].input_ids))], "stop")
    assert self_consistency(backbone, [other, whole]) == [
        (len(answers[0]) - 1, len(answers[0])), (len(answers[2]), len(answers[2])),
    ]  # fmt: skip
    turned = self_consistency(backbone, [whole, other])
    assert turned == self_consistency(backbone, [other, whole])[::-1], "in the order of the rows, not of their lengths"

    code, out, error = command("data", "inspect", run, "--rows", 0, "--self-consistency", 2)
    assert code == 0, error
    assert "tokens are the greedy choice" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none"], "none is no run of medusa-train; name the --backbone"),
        (["run/distill/rows.jsonl"], "holds no rows; run medusa-train distill first"),
        (["recipe.yaml"], "holds no rows; run medusa-train distill first"),
        (["chats.jsonl"], "name the --backbone"),
        (["chats.jsonl", "--html", "."], "--html . is a folder"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(command, recipe, tmp_path, words, told):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "the mat"}\n')
    assert_refused(command("data", "inspect", *words), told)


def test_chats_without_answers_are_refused_with_the_reasons(command, tiny_chat_folder, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "the mat"}\n')
    outcome = command("data", "inspect", "chats.jsonl", "--backbone", tiny_chat_folder)
    assert_refused(outcome, "holds nothing to learn from: 1 (no turn of an assistant)")
