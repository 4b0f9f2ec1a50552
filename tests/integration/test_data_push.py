"""`medusa-train data push` against a Hub on this machine: what goes there, and what must not."""

import json

import pytest
import yaml
from hub_server import TOKEN, HubServer, pointed_at
from huggingface_hub import DatasetCard

from conftest import assert_refused
from medusa_train.data.rows import Row, append_jsonl
from medusa_train.data_push import _prompts
from medusa_train.recipe import load_recipe
from medusa_train.run_folder import RunFolder

REPO = "zoe/answers"
SPLITS = ("train", "calibration", "heldout")


@pytest.fixture
def run(tmp_path, tiny_chat_folder):
    """A folder with a finished distill stage, made from a prompt file in a private place."""
    path = tmp_path / "recipe.yaml"
    content = {
        "output_dir": str(tmp_path / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "data": {"prompts": ["/home/zoe/secret/prompts.jsonl"]},
    }
    path.write_text(yaml.safe_dump(content))
    folder = RunFolder(load_recipe(path))
    rows = [
        Row(f"{i:016x}", SPLITS[i % 3], [{"role": "user", "content": "猫 ?"}], [5, 6, 7 + i, 1], [(2, 4)], "stop")
        for i in range(7)
    ]
    append_jsonl(folder.begin("distill") / "rows.jsonl", rows)
    folder.finish("distill", 0.0, [], {"rows": 7})
    return folder.path


@pytest.fixture
def hub(tmp_path):
    with HubServer() as server, pointed_at(server, tmp_path / "home"):
        yield server


def test_rows_and_a_card_go_to_a_private_repository(command, run, hub):
    code, out, error = command("data", "push", run, REPO, "--license", "apache-2.0")
    assert code == 0, error
    repo = hub.repos["dataset", REPO]
    assert repo.private
    files = repo.files()
    assert files.keys() - {".gitattributes"} == {"README.md", *(f"{split}.jsonl" for split in SPLITS)}
    rows = [json.loads(line) for split in SPLITS for line in files[f"{split}.jsonl"].decode().splitlines()]
    assert len(rows) == 7
    assert rows[0]["messages"] == [{"role": "user", "content": "猫 ?"}]
    assert rows[0]["spans"] == [[2, 4]]
    card = DatasetCard(files["README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert [part["split"] for part in card.data.configs[0]["data_files"]] == list(SPLITS)
    assert "| train rows (learnt tokens) | 3 (6) |" in card.text
    assert "| temperatures | 0 |" in card.text
    assert "| prompts | prompts.jsonl |" in card.text
    everything = out + error + "".join(content.decode() for content in files.values())
    assert TOKEN not in everything
    assert str(run.parent) not in everything
    assert "secret" not in everything
    assert f'load_dataset("{REPO}"' in out


def test_a_second_push_replaces_the_files(command, run, hub):
    for _ in range(2):
        assert command("data", "push", run, REPO)[0] == 0
    assert len(hub.repos) == 1


def test_a_dry_run_shows_files_and_card_and_asks_nobody(command, run, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, out, error = command("data", "push", run, REPO, "--dry-run")
    assert code == 0, error
    assert f"{REPO}, private:" in out
    assert "train.jsonl" in out
    assert "# Self-distilled with tiny-chat" in out
    assert hub.requests == []


def test_a_public_repository_needs_to_be_meant(command, run, hub):
    hub.put(REPO, {"README.md": b""}, "dataset", private=False)
    assert_refused(command("data", "push", run, REPO), "zoe/answers is public; add --public")
    assert hub.repos["dataset", REPO].files() == {"README.md": b""}
    assert command("data", "push", run, REPO, "--public")[0] == 0


def test_a_repository_of_something_else_is_left_alone(command, run, hub):
    hub.put(REPO, {"model.safetensors": b""}, "dataset", private=True)
    assert_refused(command("data", "push", run, REPO), "holds model.safetensors, which is not of such a dataset")


def test_no_token_no_rows_and_no_name_are_told_before_anything_is_sent(command, run, hub, monkeypatch, tmp_path):
    assert_refused(command("data", "push", run, "answers"), "name it as user/repository")
    assert_refused(command("data", "push", tmp_path / "none", REPO), "has no finished distill stage")
    monkeypatch.delenv("HF_TOKEN")
    assert_refused(command("data", "push", run, REPO), "no token for the Hub; set HF_TOKEN")
    assert hub.requests == []


def test_a_refused_token_is_one_line_without_it(command, run, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    outcome = command("data", "push", run, REPO)
    assert_refused(outcome, REPO)
    assert "hf_wrong" not in outcome[1] + outcome[2]


def test_the_card_names_every_source_of_prompts():
    sources = [{"path": "/home/me/a.jsonl"}, {"path": "me/b"}, {"path": "synthesize"}]
    assert _prompts(sources) == "a.jsonl, me/b, written by the backbone itself"
    assert _prompts("synthesize") == "written by the backbone itself"
