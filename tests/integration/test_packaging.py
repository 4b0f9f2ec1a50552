"""What is released: a source archive from which a wheel is made, which installs as one package that works."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]

BUILD = """
import os, sys
from setuptools import build_meta
source, archive, out = sys.argv[1:4]
os.chdir(source)
print(getattr(build_meta, "build_" + archive)(out))
"""

TINY_DECODE = """
import sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import medusa_train
from medusa_train.cli import QUICKSTART
from medusa_train.inference import HeadsConfig, MedusaHeads, MedusaModel

assert medusa_train.__file__.startswith(sys.argv[1]), medusa_train.__file__
assert str(QUICKSTART).startswith(sys.argv[1]) and QUICKSTART.read_text()
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
backbone = AutoModelForCausalLM.from_config(config).eval()
model = MedusaModel(backbone, MedusaHeads(HeadsConfig(3, 1, 32, 64)))
prompt = torch.tensor([[1, 2, 3]])
plain = backbone.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
assert model.generate(prompt, 12, eos_token_ids=()).sequences.tolist() == plain.tolist()
print("decoded", sorted(name for name in sys.modules if name.partition(".")[0] in {"wandb", "deepspeed", "trackio"}))
"""


def build(source, archive, out):
    run = subprocess.run(
        [sys.executable, "-c", BUILD, source, archive, out], capture_output=True, text=True, check=True
    )
    return Path(out) / run.stdout.split()[-1]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The source archive, the wheel made of it, and the folder that the wheel was installed into."""
    out = tmp_path_factory.mktemp("dist")
    checkout = out / "checkout"  # building writes beside the sources
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    archive = build(checkout, "sdist", out)
    with tarfile.open(archive) as content:
        content.extractall(out / "source", filter="data")
    wheel = build(next((out / "source").iterdir()), "wheel", out)
    folder = out / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel],
        check=True,
    )
    return archive, wheel, folder


def test_one_package_lands_in_site_packages(released):
    _, wheel, folder = released
    version = wheel.name.split("-")[1]
    assert {path.name for path in folder.iterdir()} == {"medusa_train", f"medusa_train-{version}.dist-info", "bin"}
    assert wheel.stat().st_size < 5e6


def test_every_file_of_the_packages_is_in_the_wheel(released):
    _, wheel, _ = released
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    kinds = {".py", ".yaml", ".json", ".j2", ".jinja", ".typed"}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in kinds and "__pycache__" not in path.parts:
                name = f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
                assert name in names, f"{name} is missing; see package-data in pyproject.toml"


def test_the_installed_wheel_works(released, tmp_path):
    _, _, folder = released
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, folder / "bin" / "medusa-train", "--help"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "publish" in shown.stdout
    decoded = subprocess.run(
        [sys.executable, "-c", TINY_DECODE, str(folder)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert decoded.stdout == "decoded []\n", decoded.stderr


def test_the_metadata_say_what_is_tested(released):
    _, wheel, _ = released
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith("METADATA"))
        metadata = content.read(name).decode()
    assert "Requires-Python: >=3.11\n" in metadata
    assert (
        f"Classifier: Programming Language :: Python :: {sys.version_info.major}.{sys.version_info.minor}\n" in metadata
    )
    assert "License-File: LICENSE\n" in metadata
    assert "# medusa-train" in metadata, "the README is the description"


def test_tools_check_for_the_oldest_python():
    oldest, *_ = re.findall(r":: Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
