"""Optional packages: imported when they are needed, and asked for by the name of their extra."""

import ast
import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from conftest import make_llama
from medusa_train import cli
from medusa_train.data.openai_backend import Servers, answer_by_servers
from medusa_train.fused_loss import check_liger
from medusa_train.inference import Backbone, UserError, load_backbone
from medusa_train.launch import check_launcher
from medusa_train.training_callbacks import check_tracker

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def launch_with_deepspeed(monkeypatch, folder):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    check_launcher("cpu")


# Extra -> the module that is missing, and what asks for it.
NEEDED = {
    "openai": ("openai", lambda *_: answer_by_servers(Servers([], ""), None)),
    "wandb": ("wandb", lambda *_: check_tracker("wandb")),
    "tensorboard": ("tensorboard", lambda *_: check_tracker("tensorboard")),
    "trackio": ("trackio", lambda *_: check_tracker("trackio")),
    "deepspeed": ("deepspeed", launch_with_deepspeed),
    "liger": ("liger_kernel", lambda *_: check_liger(Backbone.wrap(make_llama()), torch.device("cuda"))),
    "metrics": ("prometheus_client", lambda *_: cli._serve_metrics(None, 0)),
    "quantization": ("bitsandbytes", lambda _, folder: load_backbone(str(folder), quantization="4bit")),
}


def test_every_extra_of_users_is_in_the_table():
    assert NEEDED.keys() == EXTRAS.keys() - {"dev", "docs"}


@pytest.mark.parametrize("extra", NEEDED)
def test_a_missing_package_is_asked_for_by_its_extra(extra, monkeypatch, tiny_chat_folder):
    module, use = NEEDED[extra]
    monkeypatch.delitem(sys.modules, "medusa_train.inference.telemetry", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert importlib.util.find_spec(module) is None
    with pytest.raises(UserError) as told:
        use(monkeypatch, tiny_chat_folder)
    assert f"pip install 'medusa-train[{extra}]'" in str(told.value)


def test_no_optional_package_is_imported_before_it_is_needed():
    optional = {module for module, _ in NEEDED.values()}
    found = set()
    for folder in ("medusa_train", "inference", "data", "eval"):
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                roots = {name.partition(".")[0] for name in names}
                found |= {(path.name, root) for root in roots & optional}
    assert found == {("telemetry.py", "prometheus_client")}  # which chat imports when --metrics-port is given
