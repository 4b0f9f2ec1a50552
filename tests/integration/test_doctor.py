"""`medusa-train doctor`: what it tells before and after there are rows, and that it writes nothing."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import medusa_train.doctor
from conftest import assert_refused
from medusa_train.data.rows import Row, append_jsonl
from medusa_train.recipe import load_recipe
from medusa_train.row_text import row_text
from medusa_train.run_folder import RunFolder


@pytest.fixture
def recipe(tmp_path, tiny_chat_folder):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is this ?"}\n{"prompt": "and the cat ?"}\n')
    content = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"draft_vocab_size": 64},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 8},
        "training": {"per_device_train_batch_size": 4},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def write_rows(recipe, rows):
    """Rows as the distill stage leaves them."""
    folder = RunFolder(load_recipe(recipe))
    append_jsonl(folder.begin("distill") / "rows.jsonl", rows)


def make_row(number, split, end=1, finish_reason="stop"):
    answer = [10 + (number * 7 + place) % 90 for place in range(9)]
    return Row(str(number), split, [], [0, 2, 3, *answer, end], [(3, 13)], finish_reason)


def files_of(folder):
    """Every file below a folder, apart from the cache of the datasets library."""
    files = (path for path in folder.rglob("*") if path.is_file() and "datasets-cache" not in path.parts)
    return {path: path.read_bytes() for path in files}


def test_before_any_stage_it_tells_what_can_be_known(command, recipe, tmp_path):
    before = files_of(tmp_path)
    code, out, error = command("doctor", recipe, "--json", tmp_path / "doctor.json")
    assert code == 0, error
    told = json.loads((tmp_path / "doctor.json").read_text())
    assert told["data"]["prompts"] == 2
    assert told["data"]["positions_at_most"] == 16
    assert told["disk"]["cache_bytes_at_most"] == 16 * (2 * 32 + 16 + 20)
    assert told["heads"]["parameters"] == 3 * (32 * 32 + 32 + 64 * 32)
    assert told["heads"]["optimizer_bytes"] == 8 * told["heads"]["parameters"]
    assert told["backbone"]["follows_a_tree"]
    assert told["train"]["step_seconds_estimate"] > 0
    assert "no rows yet" in out
    assert "padding token is the end token" in out
    assert "no {% generation %} marks" in out
    (tmp_path / "doctor.json").unlink()
    assert files_of(tmp_path) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("native", [True, False])
def test_a_dtype_that_the_device_emulates_is_told(command, recipe, monkeypatch, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native}, raising=False)
    code, out, error = command("doctor", recipe, "backbone.dtype=bfloat16")
    assert code == 0, error
    assert ("cpu has no bfloat16 instructions and emulates them; prefer backbone.dtype=auto" in out) == (not native)


def test_rows_are_counted_and_one_is_shown(command, recipe, tmp_path):
    write_rows(recipe, [make_row(i, ("train", "calibration", "heldout")[i % 3]) for i in range(9)])
    before = files_of(tmp_path)
    code, out, error = command("doctor", recipe, "--json", tmp_path / "doctor.json")
    assert code == 0, error
    told = json.loads((tmp_path / "doctor.json").read_text())
    assert told["data"]["rows"] == {"train": 3, "calibration": 3, "heldout": 3}
    assert told["data"]["targets"] == [27, 24, 21]
    assert told["train"]["steps"] == 2 * 7
    assert out.count("[[") == out.count("]]") == 2  # the legend and the answer
    assert "<|im_end|>]]" in out
    assert "\x1b" not in out
    assert "warning: 27 training positions are few" in out
    (tmp_path / "doctor.json").unlink()
    assert files_of(tmp_path) == before


def test_prompts_that_will_be_left_out_are_told(command, recipe, tmp_path):
    records = [{"prompt": "the cat"}, {"prompt": "The  cat"}, {"prompt": " "}, {"prompt": "on the mat " * 300}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, _ = command("doctor", recipe)
    assert code == 2
    assert "prompts.jsonl line 3: an empty turn" in out
    code, out, error = command("doctor", recipe, "data.on_bad_rows=skip", "--json", tmp_path / "doctor.json")
    assert code == 0, error
    told = json.loads((tmp_path / "doctor.json").read_text())["data"]
    assert told["prompts"] == 1
    assert told["dropped"] == {
        "the same prompt again": 1, "an empty turn": 1, "no room for 8 tokens within the model's 256 positions": 1,
    }  # fmt: skip
    assert "left out: 1, no room for 8 tokens" in out


def test_prompts_that_the_backbone_will_write_are_counted(command, recipe, tmp_path):
    words = ["data.num_prompts=9", "--json", tmp_path / "doctor.json"]
    mixture = f"data.prompts=[{tmp_path / 'prompts.jsonl'}, {{path: synthesize, weight: 2}}]"
    for given, prompts, told in (
        (mixture, 2 + 6, "will write 6 prompts"),
        ("data.prompts=synthesize", 9, "will write"),
    ):
        code, out, error = command("doctor", recipe, given, *words)
        assert code == 0, error
        found = json.loads((tmp_path / "doctor.json").read_text())["data"]
        assert found["prompts"] == prompts
        assert told in found["origin"]
        assert "./synthesize" not in out
    (tmp_path / "synthesize").mkdir()
    assert "warning: data.prompts=synthesize lets the backbone write" in command("doctor", recipe, mixture, *words)[1]
    assert "./synthesize" not in command("doctor", recipe, *words)[1]


def test_a_run_that_no_prompt_is_left_for_must_fail(command, recipe, tmp_path):
    tools = [{"type": "function", "function": {"name": "look"}}]
    records = [{"messages": [{"role": "user", "content": f"{word} ?"}], "tools": tools} for word in ("cat", "mat")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, _ = command("doctor", recipe)
    assert code == 2
    assert "no record gives a row" in out
    assert "left out: 2, the chat template does not show declared tools" in out


def test_conversations_are_read_now_and_what_is_left_out_is_told(command, recipe, tmp_path):
    said = [
        {"messages": [{"role": "user", "content": f"the cat {i}"}, {"role": "assistant", "content": f"the mat {i}"}]}
        for i in range(60)
    ]
    said += [said[0], {"messages": [{"role": "user", "content": "what"}]}]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(record) + "\n" for record in said))
    words = [f"data.conversations={tmp_path / 'said.jsonl'}", "data.on_bad_rows=skip"]
    words += ["--json", tmp_path / "doctor.json"]
    code, out, error = command("doctor", recipe, *words)
    assert code == 0, error + out
    told = json.loads((tmp_path / "doctor.json").read_text())["data"]
    assert sum(told["rows"].values()) == told["with_end"] == 60
    assert sorted(told["dropped"].values()) == [1, 1]
    assert "left out: 1, the same conversation again" in out
    assert "left out: 1, no turn of an assistant" in out


@pytest.mark.parametrize("words", [["heads.kind=hydra"], ["heads.lm_head=shared"], ["heads.draft_vocab_size=0"]])
def test_every_kind_of_heads_is_timed(command, recipe, tmp_path, words):
    code, _, error = command("doctor", recipe, *words, "--json", tmp_path / "doctor.json")
    assert code == 0, error
    assert json.loads((tmp_path / "doctor.json").read_text())["train"]["step_seconds_estimate"] > 0


def test_online_training_stores_no_training_states_and_is_timed_with_the_backbone(command, recipe, tmp_path):
    write_rows(recipe, [make_row(i, ("train", "calibration", "heldout")[i % 3]) for i in range(9)])
    code, _, error = command(
        "doctor", recipe, "training.mode=online", "training.pack_tokens=64", "--json", tmp_path / "doctor.json"
    )
    assert code == 0, error
    told = json.loads((tmp_path / "doctor.json").read_text())
    assert told["disk"]["cache_bytes"] == 60 * (2 * 32 + 16 + 20)
    assert told["train"]["step_seconds_estimate"] > 0
    assert told["train"]["steps"] == 2  # one pack, two epochs
    assert told["train"]["batch_positions"] == 4 * 64
    assert "adapter" not in told


def test_an_adapter_is_counted_and_timed(command, recipe, tmp_path, monkeypatch):
    write_rows(recipe, [make_row(i, ("train", "calibration", "heldout")[i % 3]) for i in range(9)])
    words = ["training.mode=online", "training.pack_tokens=64", "lora={r: 4}", "--json", tmp_path / "doctor.json"]
    code, out, error = command("doctor", recipe, *words)
    assert code == 0, error
    told = json.loads((tmp_path / "doctor.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(load_recipe(recipe).backbone.source)
    layers = [m for m in base.model.modules() if isinstance(m, torch.nn.Linear)]
    parameters = sum(4 * (layer.in_features + layer.out_features) for layer in layers)
    assert told["adapter"]["parameters"] == parameters
    assert told["adapter"]["optimizer_bytes"] == 8 * parameters
    assert told["train"]["step_seconds_estimate"] > 0
    assert "LoRA of" in out
    monkeypatch.setattr(medusa_train.doctor, "_weights_are_here", lambda _: False)
    assert "online training is not timed" in command("doctor", recipe, *words)[1]


def test_what_training_lacks_is_told_and_the_rest_is_timed(command, recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ("training.use_liger_kernel=true", "training.report_to=wandb")
    code, _, _ = command("doctor", recipe, *words, "--json", tmp_path / "doctor.json")
    assert code == 2
    told = json.loads((tmp_path / "doctor.json").read_text())
    errors = [finding["message"] for finding in told["findings"] if finding["level"] == "error"]
    assert [any(name in error for error in errors) for name in ("use_liger_kernel", "medusa-train[wandb]")] == [
        True
    ] * 2
    assert told["train"]["step_seconds_estimate"] > 0


def test_a_missing_end_token_is_told(command, recipe):
    write_rows(recipe, [make_row(i, ("train", "calibration", "heldout")[i % 3], end=9) for i in range(9)])
    assert "no end token is ever a target" in command("doctor", recipe)[1]


def test_what_stops_a_stage_is_told_with_everything_else_and_exits_with_2(command, recipe, tmp_path):
    write_rows(recipe, [make_row(i, "train") for i in range(3)])
    code, out, error = command("doctor", recipe)
    assert code == 2
    assert error.count("medusa-train:") == 0
    assert "error: no row in the calibration split" in out
    assert "error: no row in the heldout split" in out
    assert "training positions are few" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.prompts=none.jsonl"], "error: prompts none.jsonl: no such file"),
        (["data.conversations=none.jsonl"], "error: prompts none.jsonl: no such file"),
    ],
)
def test_a_source_that_cannot_be_read_is_told(command, recipe, words, told):
    code, out, _ = command("doctor", recipe, *words)
    assert code == 2
    assert told in out
    assert "step" in out


def test_a_run_of_another_recipe_is_told(command, recipe, tmp_path):
    assert command("prompts", recipe)[0] == 0
    code, out, _ = command("doctor", recipe, "data.num_prompts=1")
    assert code == 2
    assert "error:" in out
    assert "was made with data.num_prompts=640" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["backbone.source=./none"], "backbone ./none: no such folder"),
        (["heads.draft_vocab_size=9999"], "heads.draft_vocab_size=9999 is outside 0..512"),
        (["heads.num_head=2"], "did you mean heads.num_heads?"),
        (["--json", "."], "--json . is a folder"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_in_one_line(command, recipe, words, told):
    assert_refused(command("doctor", recipe, *words), told)


def test_a_backbone_that_a_tree_cannot_serve_is_told(command, recipe, tiny_chat_folder, tmp_path):
    folder = tmp_path / "hybrid"
    shutil.copytree(tiny_chat_folder, folder, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, layer_types=["linear_attention", "full_attention"], num_experts=2,
    )  # fmt: skip
    config.save_pretrained(folder)
    code, out, _ = command("doctor", recipe, f"backbone.source={folder}")
    assert code == 2
    assert "has linear_attention layers" in out


def test_a_row_is_coloured_or_bracketed_and_cannot_steer_the_terminal():
    pieces = [("user\x1b[2J\n", False), ("yes", True), ("\n", False)]
    assert row_text(pieces, in_colour=False).plain == "user\N{REPLACEMENT CHARACTER}[2J\n[[yes]]\n"
    coloured = row_text(pieces, in_colour=True)
    assert coloured.plain == "user\N{REPLACEMENT CHARACTER}[2J\nyes\n"
    green = [coloured.plain[span.start : span.end] for span in coloured.spans if span.style == "green"]
    assert green == ["yes"]
