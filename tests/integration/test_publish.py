"""Publishing against a Hub on this machine: what goes there, what must not, and loading it back."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import TOKEN, Fault, HubServer, pointed_at
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from conftest import assert_refused
from medusa_train.eval.report import interval_text
from medusa_train.import_heads import import_heads
from medusa_train.inference import UserError, load_backbone
from medusa_train.inference.checkpoint import load_heads
from medusa_train.job import Job
from medusa_train.model_card import _data, model_card
from medusa_train.publish import hub_errors
from medusa_train.recipe import load_recipe
from medusa_train.release import prepare_release, without_paths
from medusa_train.stages import run_stages

WEIGHTS = "medusa_lm_head.safetensors"
WORDS = ["what", "is", "the", "cat", "on", "mat", "and", "this", "that", "sat", "user", "system"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, tiny_chat_folder):
    """A whole run of a tiny model, in a home directory of its own."""
    home = tmp_path_factory.mktemp("home") / "zoe"
    prompts = home / "prompts.jsonl"
    home.mkdir()
    texts = {" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 4 + i % 5)) for i in range(60)}
    prompts.write_text("".join(json.dumps({"prompt": f"{text} ?"}) + "\n" for text in sorted(texts)))
    recipe = {
        "output_dir": str(home / "run"),
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"num_heads": 2, "draft_vocab_size": 128},
        "data": {"prompts": str(prompts), "num_prompts": None, "max_new_tokens": 10, "batch_size": 8,
                 "calibration_share": 0.2, "heldout_share": 0.2},
        "training": {"num_train_epochs": 1, "per_device_train_batch_size": 32},
        "inference": {"tree_sizes": [4], "step_time_rounds": 1, "step_time_steps": 1},
        "eval": {"num_prompts": 2, "max_new_tokens": 8, "repeats": 1},
    }  # fmt: skip
    path = home / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_stages(Job(load_recipe(path)), "eval")
    return home / "run"


@pytest.fixture
def run(whole_run, monkeypatch):
    """A copy of the run that a test may spoil; its report is published without pictures, which take seconds."""

    def write_report(folder, report):
        (folder / "report.json").write_text(json.dumps(report))
        (folder / "report.html").write_text("")

    monkeypatch.setattr("medusa_train.release.write_report", write_report)
    return whole_run


@pytest.fixture
def whole_run(finished_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(finished_run.parent))
    shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("cache", "checkpoint-*"))
    return tmp_path / "run"


@pytest.fixture
def hub(tmp_path, tiny_chat_folder):
    """A Hub with the tiny model as its only repository."""
    with HubServer() as server, pointed_at(server, tmp_path / "hub-home"):
        files = {path.name: path.read_bytes() for path in tiny_chat_folder.iterdir()}
        server.put("ann/tiny", files).card = {"license": "apache-2.0"}
        yield server


@pytest.fixture
def no_waiting(monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


def publish(command, run, *options, repo="bob/heads", backbone="ann/tiny"):
    return command("publish", run / "heads", repo, "--backbone", backbone, *options)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(run, change):
    tensors = load_file(run / "heads" / WEIGHTS)
    change(tensors)
    save_file(tensors, run / "heads" / WEIGHTS)


def wrote(hub):
    """Requests that change something."""
    return [request for request in hub.requests if request[0] in ("POST", "PUT")]


def test_a_published_repository_holds_heads_figures_and_card(command, whole_run, hub):
    run = whole_run
    code, output, error = publish(command, run, "--commit-message", "first heads")
    assert code == 0, error
    repo = hub.repos["model", "bob/heads"]
    assert repo.private
    assert repo.messages == ["first heads"]
    files = repo.files()
    assert set(files) == {
        WEIGHTS, "config.json", "tree.json", "run.json", "report.json", "report.html", "README.md",
        "custom_generate/generate.py",
    }  # fmt: skip
    assert files[WEIGHTS] == (run / "heads" / WEIGHTS).read_bytes()
    config = json.loads(files["config.json"])
    assert config["base_model_name_or_path"] == "ann/tiny"
    assert b'HEADS = "bob/heads"' in files["custom_generate/generate.py"]
    assert repo.branches["main"] in output
    # Nothing of this machine, nor the token, is in any of them.
    whole = b"".join(files.values())
    for private in (str(run.parent), str(Path.home()), "/zoe", TOKEN):
        assert private.encode() not in whole, private
    assert TOKEN not in output + error
    recipe = json.loads(files["run.json"])["train"]["recipe"]
    assert recipe["output_dir"] == "run"
    assert recipe["data"]["prompts"] == "prompts.jsonl"

    # The same again sends and commits nothing.
    hub.requests.clear()
    assert publish(command, run, "--commit-message", "again")[0] == 0
    assert repo.messages == ["first heads"]
    assert not [path for method, path in hub.requests if method == "PUT" or "/commit/" in path]

    # A branch is made where it is named, and leaves main as it was.
    edit_weights(run, lambda tensors: tensors["0.0.linear.bias"].add_(1))
    before = repo.branches["main"]
    assert publish(command, run, "--revision", "louder")[0] == 0
    assert repo.branches["main"] == before != repo.branches["louder"]


def test_the_card_states_the_figures_of_the_report(run, hub, command):
    assert publish(command, run)[0] == 0
    files = hub.repos["model", "bob/heads"].files()
    card, report = ModelCard(files["README.md"].decode()), json.loads(files["report.json"])
    data = card.data
    assert (data.base_model, data.base_model_relation, data.library_name) == ("ann/tiny", "adapter", "medusa-train")
    assert data.license == "apache-2.0"
    assert {"medusa", "custom_generate"} <= set(data.tags)
    assert {result.metric_type: result.metric_value for result in data.eval_results} == {
        "tokens_per_step": report["acceptance"]["tokens_per_step"],
        "speedup_over_generate": report["speedup"]["over_generate"]["median"],
        "speedup_over_plain": report["speedup"]["over_plain"]["median"],
    }
    rows = dict(cells for line in card.text.splitlines() if len(cells := line[2:-2].split(" | ")) == 2)
    step = "tokens per step (bonus token counted, plain decoding = 1)"
    assert rows[step] == f"{report['acceptance']['tokens_per_step']:.2f}"
    over = rows["decode speedup over transformers `generate` (95 % interval over prompts)"]
    assert over == interval_text(report["speedup"]["over_generate"])
    assert rows["tokens per verification pass"] == str(report["setting"]["tree_size"])
    assert rows["identical to plain greedy decoding"] == f"100 % of {report['setting']['timed_prompts']} prompts"
    assert report["definitions"]["tokens_per_step"] in card.text
    assert "https://huggingface.co/ann/tiny" in card.text
    for way in (
        'from_pretrained("bob/heads")',
        'custom_generate="bob/heads"',
        "--to vllm --pad-vocabulary",
        "--to tgi",
    ):
        assert way in card.text, way
    assert "{" not in card.text.replace("{'method'", "").partition("--speculative-config")[0]
    # The folder of the run has a card too, without what only a repository can do.
    local = (run / "heads" / "README.md").read_text()
    assert "custom_generate" not in local
    assert rows[step] in local


def test_categories_of_the_report_are_in_the_card(run):
    report = prepare_release(run / "heads", "bob/heads", "ann/tiny").report
    over = report["speedup"]["over_plain"] | {"median": 1.5}
    rows = [
        {"category": name, "prompts": 3, "timed_prompts": timed,
         "arms": {"medusa": {"tokens_per_step": step, "over_plain": over}}}
        for name, timed, step, over in (("coding", 2, 2.25, over), ("roleplay", 0, None, None))
    ]  # fmt: skip
    card = model_card(report | {"categories": rows}, "bob/heads", {})
    assert "| coding | 3 | 2.25 | 2 | 1.50 (" in card
    assert "| roleplay | 3 | n/a | 0 | n/a |" in card


LOAD = """
import torch
from huggingface_hub import constants
from medusa_train.inference import MedusaModel
from transformers import AutoModelForCausalLM

prompt = torch.tensor([[5, 6, 7, 8]])
for constants.HF_HUB_OFFLINE in (False, True):  # the second time, every request is an error
    plain = AutoModelForCausalLM.from_pretrained("ann/tiny", dtype="float32")
    greedy = plain.generate(prompt, max_new_tokens=12, do_sample=False).tolist()
    ours = MedusaModel.from_pretrained("bob/heads", dtype="float32")
    assert ours.generate(prompt, max_new_tokens=12).sequences.tolist() == greedy
    theirs = plain.generate(
        prompt, max_new_tokens=12, do_sample=False, custom_generate="bob/heads", trust_remote_code=True
    )
    assert theirs.tolist() == greedy
"""


def test_published_heads_decode_from_the_hub_and_then_without_a_network(command, run, hub, tmp_path):
    """In our engine and in plain transformers, in a process that knows nothing but the endpoint."""
    assert publish(command, run)[0] == 0
    environment = hub.environment(tmp_path / "reader")
    loaded = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr


def test_a_revision_is_the_one_that_was_asked_for(command, run, hub, monkeypatch):
    values = {}
    for value in (0.25, 0.5):
        edit_weights(run, lambda tensors, value=value: tensors["0.0.linear.bias"].fill_(value))
        assert publish(command, run)[0] == 0
        values[hub.repos["model", "bob/heads"].branches["main"]] = value
    for revision, value in [*values.items(), ("main", 0.5)]:
        assert float(load_heads("bob/heads", revision).heads.state_dict()["heads.0.0.linear.bias"][0]) == value
    with pytest.raises(UserError, match="bob/heads"):
        load_heads("bob/heads", "no-such-branch")
    with pytest.raises(UserError, match="has no revision"):
        load_heads(run / "heads", "main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="not to be had from the Hub"):
        load_heads("ann/heads")


def test_a_dry_run_shows_files_and_card_and_asks_nothing(command, run, hub):
    code, output, _ = publish(command, run, "--dry-run")
    assert code == 0
    assert hub.requests == []
    for part in (WEIGHTS, "report.html", "custom_generate/generate.py", "bob/heads, private", "base_model: ann/tiny"):
        assert part in output, part


def spoil_nan(run):
    edit_weights(run, lambda tensors: tensors["1.1.weight"][3].fill_(torch.nan))


def spoil_link(run):
    secret = run.parent / "secret.json"
    secret.write_text("{}")
    (run / "heads" / "tree.json").unlink()
    (run / "heads" / "tree.json").symlink_to(secret)


def adapted(**changes):
    figures = {"kl_to_base": 0.01, "perplexity_drift": 0.01, "base_perplexity": 2.0, "adapted_perplexity": 2.02}

    def spoil(run):
        for path in (run / "report.json", run / "train" / "run.json"):
            edit_json(path, lambda c: c.get("made", {"train": c})["train"]["result"].update(figures | changes))

    return spoil


SPOILT = {
    "no report": (lambda run: (run / "report.json").unlink(), "not published without figures"),
    "no tokens per step": (
        lambda run: edit_json(run / "report.json", lambda c: c["acceptance"].update(tokens_per_step=None)),
        "lacks tokens per step",
    ),
    "no speedup": (
        lambda run: edit_json(run / "report.json", lambda c: c.update(speedup={})), "lacks tokens per step or a speedup"
    ),
    "an old report": (lambda run: edit_json(run / "report.json", lambda c: c.pop("setting")), "another version"),
    "a report of other heads": (
        lambda run: edit_json(run / "train" / "run.json", lambda c: c["result"].update(last_loss=0)), "other heads"
    ),
    "a report of another tree": (
        lambda run: (run / "heads" / "tree.json").write_text('{"paths": [[0]]}'), "another tree"
    ),
    "no tree": (lambda run: (run / "heads" / "tree.json").unlink(), "no tree.json"),
    "not a number": (spoil_nan, "1.1.weight holds NaN"),
    "a pickle": (lambda run: (run / "heads" / "optimizer.pt").write_bytes(b""), "optimizer.pt is no file of heads"),
    "code": (lambda run: (run / "heads" / "modeling.py").write_text(""), "modeling.py is no file of heads"),
    "a hidden file": (lambda run: (run / "heads" / ".env").write_text("HF_TOKEN=x"), ".env is no file of heads"),
    "a link that leaves": (spoil_link, "tree.json is a link that leaves the folder"),
    "code in the config": (
        lambda run: edit_json(run / "heads" / "config.json", lambda c: c.update(auto_map={"a": "b"})), "auto_map"
    ),
    "a backbone that moved": (adapted(kl_to_base=0.2), "0.2 nats per token from the original, over 0.1"),
    "a backbone that got worse": (adapted(perplexity_drift=0.08), "8.0% above the original's, over 5%"),
    "a backbone that broke": (adapted(kl_to_base=float("nan")), "nan nats per token"),
}  # fmt: skip


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_must_not_be_published_is_refused_before_anything_is_asked(command, run, hub, spoilt):
    spoil, told = SPOILT[spoilt]
    spoil(run)
    assert_refused(publish(command, run), told)
    assert hub.requests == []


def test_a_backbone_that_hardly_moved_is_published_with_its_adapter(command, run, hub):
    adapted()(run)
    edit_json(run / "heads" / "config.json", lambda c: c.update(adapter=True))
    folder = run / "heads" / "adapter"
    assert_refused(publish(command, run), "no adapter/adapter_config.json")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/models/tiny", "r": 4}))
    assert_refused(publish(command, run), "adapter_model.safetensors is missing or damaged")
    save_file({"a": torch.tensor([1.0, torch.inf])}, folder / "adapter_model.safetensors")
    assert_refused(publish(command, run), "tensor a holds NaN or infinity")
    save_file({"a": torch.zeros(0)}, folder / "adapter_model.safetensors")  # what ZeRO-3 leaves before gathering
    assert_refused(publish(command, run), "tensor a is empty")
    assert hub.requests == []
    save_file({"a": torch.ones(2)}, folder / "adapter_model.safetensors")
    assert publish(command, run)[0] == 0
    files = hub.repos["model", "bob/heads"].files()
    assert json.loads(files["adapter/adapter_config.json"]) == {"base_model_name_or_path": "ann/tiny", "r": 4}
    assert files["adapter/adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "that of the adapted backbone" in card
    assert 'PeftModel.from_pretrained(model, "bob/heads", subfolder="adapter")' in card


def test_names_that_nobody_else_can_load_are_refused(command, run, hub):
    assert_refused(command("publish", run / "heads", "bob/heads"), "--backbone org/model")
    assert_refused(publish(command, run, repo="heads"), "user/repository")
    for name in ("a/..", "../b", "a/b/c", "a/-b", "a/b.git"):
        assert_refused(publish(command, run, repo=name), f"repository {name!r}")
        assert_refused(publish(command, run, "--dry-run", backbone=name), f"--backbone {name!r}")
    for branch in ("../x", "a b", "-x", ""):
        assert_refused(publish(command, run, "--dry-run", f"--revision={branch}"), "is no name of a branch")
    assert_refused(command("publish", run, "bob/heads"), f"name its heads: {run / 'heads'}")
    assert_refused(command("publish", run / "nothing", "bob/heads"), "no such folder")
    assert hub.requests == []


def test_repositories_of_something_else_are_left_alone(command, run, hub):
    assert_refused(publish(command, run, backbone="ann/huge"), "ann/huge: no such repository")
    hub.put("ann/other", {"config.json": b'{"hidden_size": 64, "vocab_size": 512}'})
    assert_refused(publish(command, run, backbone="ann/other"), "backbone mismatch", "ann/other has 64")

    hub.put("bob/model", {"model.safetensors": b"", "config.json": b"{}"}, private=True)
    assert_refused(publish(command, run, repo="bob/model"), "holds model.safetensors")
    theirs = {"base_model_name_or_path": "ann/large", "hidden_size": 32, "vocab_size": 512}
    hub.put("bob/large", {"config.json": json.dumps(theirs).encode(), WEIGHTS: b""}, private=True)
    assert_refused(publish(command, run, repo="bob/large"), "backbone mismatch", "heads for ann/large")
    assert wrote(hub) == []

    hub.put("bob/open", {}, private=False)
    assert_refused(publish(command, run, repo="bob/open"), "is public; add --public")
    assert wrote(hub) == []
    assert publish(command, run, "--public", repo="bob/open")[0] == 0
    assert publish(command, run, "--public", repo="bob/new")[0] == 0
    assert not hub.repos["model", "bob/new"].private


def test_a_busy_hub_is_asked_again(command, run, hub, no_waiting):
    hub.faults = [
        Fault("GET", "/api/models/bob", 503),
        Fault("POST", "/repos/create", 429, headers={"Retry-After": "7"}),
        Fault("POST", "/preupload/", 500),
        Fault("PUT", "/lfs/", 0),
        Fault("POST", "/commit/", 0),
        Fault("POST", "/commit/", 502),
    ]
    code, _, error = publish(command, run)
    assert code == 0, error
    assert not any(fault.times for fault in hub.faults)
    assert 7 in no_waiting
    assert hub.repos["model", "bob/heads"].files()[WEIGHTS] == (run / "heads" / WEIGHTS).read_bytes()
    assert len(hub.repos["model", "bob/heads"].messages) == 1


def test_an_interrupted_upload_goes_on(command, run, hub, no_waiting):
    hub.faults = [Fault("POST", "/commit/", 500, times=99)]
    code, _, error = publish(command, run)
    assert code == 2
    assert error.endswith("medusa-train: bob/heads: the Hub failed (500); the same command goes on from here\n")
    assert hub.repos["model", "bob/heads"].files() == {}
    hub.faults, sent = [], len([request for request in hub.requests if request[0] == "PUT"])
    assert sent == 1
    assert publish(command, run)[0] == 0
    assert len([request for request in hub.requests if request[0] == "PUT"]) == sent
    assert WEIGHTS in hub.repos["model", "bob/heads"].files()


def test_no_token_no_network_and_a_wrong_token_are_one_line_each(command, run, hub, monkeypatch, tmp_path, no_waiting):
    monkeypatch.delenv("HF_TOKEN")
    assert_refused(publish(command, run), "no token for the Hub", "hf auth login")
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrongWrongWrong")
    outcome = publish(command, run)
    assert_refused(outcome, "the Hub refused the token (401)")
    assert "hf_wrongWrongWrong" not in "".join(outcome[1:])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.faults = [Fault("POST", "/repos/create", 429, times=99)]
    assert_refused(publish(command, run), "takes no more requests for now (429)")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused(publish(command, run), "the Hub cannot be reached", "offline mode")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.close()
    outcome = publish(command, run)
    assert_refused(outcome, "the Hub cannot be reached")
    assert TOKEN not in "".join(outcome[1:])


@pytest.mark.parametrize(
    ("value", "public"),
    [
        ("/home/ann/my data/x.jsonl", "x.jsonl"),
        ("~/models/tiny/", "tiny"),
        (r"C:\Users\ann\x.jsonl", "x.jsonl"),
        ("../../ann/x.jsonl", "x.jsonl"),
        ("data/../../ann/x.jsonl", "x.jsonl"),
        ("draft model /home/ann/x: no such folder", "draft model x: no such folder"),
        ("runs/mine", "runs/mine"),
        ("org/model", "org/model"),
        ("pkg://pack/file.gguf", "pkg://pack/file.gguf"),
        ("https://host/v1", "https://host/v1"),
        ("tokens/s, steps / steps", "tokens/s, steps / steps"),
    ],
)
def test_paths_are_cut_down_to_names(value, public):
    assert without_paths({"a": [value]}) == {"a": [public]}
    assert without_paths({"sample": {"text": value}}) == {"sample": {"text": value}}


def test_a_path_of_this_home_never_gets_out(run, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere/ann")
    edit_json(run / "report.json", lambda c: c["sample"].update(prompt="see /somewhere/ann/notes"))
    with pytest.raises(UserError, match="would publish the path /somewhere/ann"):
        prepare_release(run / "heads", "bob/heads", "ann/tiny")


def test_code_in_a_repository_of_heads_is_neither_fetched_nor_run(command, run, hub, tmp_path):
    assert publish(command, run)[0] == 0
    good, mark = hub.repos["model", "bob/heads"].files(), tmp_path / "mark"
    evil = f"open({str(mark)!r}, 'w')".encode()
    config = json.loads(good["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    hub.put("eve/heads", good | {
        "config.json": json.dumps(config).encode(), "modeling.py": evil, "__init__.py": evil, "setup.py": evil,
        "pytorch_model.bin": b"cos\nsystem\n(S'touch mark'\ntR.", "medusa_lm_head.pt": b"cos\nsystem\n(S'ls'\ntR.",
        "../../../escaped.json": b"{}", "adapter/../../escaped.safetensors": b"",
    })  # fmt: skip
    # The backbone comes from the same hands.
    base = hub.repos["model", "ann/tiny"].files()
    theirs = json.loads(base["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    hub.put("eve/base", base | {"config.json": json.dumps(theirs).encode(), "modeling.py": evil})
    cache = tmp_path / "hub-home" / "hub"
    assert load_heads("eve/heads").tree is not None
    folder = next((cache / "models--eve--heads" / "snapshots").iterdir())
    assert {path.name for path in folder.rglob("*")} == {WEIGHTS, "config.json", "tree.json"}
    assert not list(tmp_path.rglob("escaped*"))
    assert load_backbone("eve/base").source == "eve/base"
    assert not mark.exists()


def test_an_imported_repository_writes_nothing_outside_its_folder(hub, tmp_path):
    hub.put("eve/old", {"config.json": b"{}", "../../../../escaped.pt": b"x", "medusa_lm_head.pt": b"x"})
    with pytest.raises(UserError, match="eve/old"):
        import_heads("eve/old", tmp_path / "out")
    assert not list(tmp_path.rglob("escaped*"))
    assert not (tmp_path / "out").exists()


def test_an_error_that_quotes_the_token_is_told_without_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError, match=r"cannot be reached \(proxy refused \[token\]\)"), hub_errors("bob/heads"):
        raise ConnectionError(f"proxy refused {TOKEN}")


ABSURD = {
    "sizes": ({"vocab_size": 10**12}, {}),
    "shared sizes": ({"vocab_size": 10**12, "original_lm_head": True, "draft_vocab_size": 0}, {}),
    "heads": ({"medusa_num_heads": 10**9}, {}),
    "layers": ({"medusa_num_layers": 10**9}, {}),
    "words": ({"draft_vocab_size": "many"}, {}),
    "probe": ({"backbone_probe": "abc"}, {}),
    "a probe of nothing": ({"backbone_probe": [float("nan")] * 16}, {}),
    "a deep tree": ({}, {"paths": [[0] * 100_000]}),
    "a wide tree": ({}, {"paths": [[i] for i in range(100_000)]}),
    "no tree at all": ({}, {"paths": 5}),
    "a wide superset": (
        {},
        {"adaptive": {"nodes": [[0] * 100_000], "temperatures": [1], "step_seconds": {}, "text_seconds": {}}},
    ),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_numbers_are_refused_before_memory_is_taken(run, name):
    config, tree = ABSURD[name]
    edit_json(run / "heads" / "config.json", lambda c: c.update(config))
    edit_json(run / "heads" / "tree.json", lambda c: c.update(tree))
    with pytest.raises(UserError):
        load_heads(run / "heads")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("synthesize", "(prompts that it wrote too)"),
        ("a.jsonl, me/b", "(prompts of a.jsonl, me/b)"),
        ("a.jsonl, me/b, synthesize", "(prompts of a.jsonl, me/b and prompts that it wrote too)"),
    ],
)
def test_the_card_tells_whose_prompts_were_answered(source, told):
    made = {
        "train": {"result": {"positions": 10}, "recipe": {"data": {"conversations": None}}},
        "prompts": {"result": {"source": source}},
        "distill": {"result": {"rows": 2}},
    }
    assert _data(made) == f"10 positions of 2 answers that the backbone wrote itself {told}."
