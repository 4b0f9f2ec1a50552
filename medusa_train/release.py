"""What of a run goes to the Hub, checked and cleaned before anything leaves this machine.

Only files that this package writes are published, and only after a look inside: heads that load and hold finite
numbers, figures that are theirs, an adapted backbone that is still the one it was. What a run records about the machine
it ran on (folders, the names of people in them) is cut down to file names.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.eval.drift import beyond_limits
from medusa_train.eval.report import write_report
from medusa_train.inference.checkpoint import ADAPTER, CONFIG, TREE, WEIGHTS, load_heads
from medusa_train.inference.errors import UserError
from medusa_train.model_card import is_hub_id, model_card, speedups, tokens_per_step

CARD = "README.md"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors"
OURS = frozenset({WEIGHTS, CONFIG, TREE, CARD, ADAPTER_CONFIG, ADAPTER_WEIGHTS})
GENERATE = "custom_generate/generate.py"
# All that a repository of heads may hold, .gitattributes being the Hub's own.
PUBLISHED = OURS | {"run.json", "report.json", "report.html", GENERATE, ".gitattributes"}
LARGEST_FILE = 50e9  # bytes; the Hub takes no larger one
LARGEST_PAGE = 5e6  # bytes of report.html; it is left out beyond

_WHOLE_PATH = re.compile(r"(?:~?/|[A-Za-z]:[\\/]|\\\\).*|.*(?:^|/)\.\.(?:/.*)?", re.DOTALL)
_PATH_INSIDE = re.compile(r"(?<![\w:/.])(?:~?/|[A-Za-z]:[\\/])[^\s'\",;]+")


@dataclass(frozen=True)
class Release:
    """A repository of heads as it will be, but for its card.

    Attributes:
        repo_id: where it goes.
        backbone: the backbone's repository on the Hub.
        config: the heads' ``config.json`` as published.
        report: the evaluation as published.
        files: path in the repository -> content, or the file that holds it.
    """

    repo_id: str
    backbone: str
    config: dict[str, Any]
    report: dict[str, Any]
    files: dict[str, bytes | Path]

    def card(self, licence: dict[str, str]) -> str:
        return model_card(self.report, self.repo_id, licence)


def prepare_release(folder: Path, repo_id: str, backbone: str = "") -> Release:
    """Check a run's heads and put together what is published.

    Args:
        folder: ``heads`` of a finished run, beside its ``report.json``.
        backbone: the backbone's repository on the Hub, where the run used a copy of it.

    Raises:
        UserError: a file that is not ours or is damaged, figures that are missing or of other heads, a backbone that
            nobody else can load, or one that Medusa-2 moved too far.
    """
    check_files(folder)
    checkpoint = load_heads(folder)
    if checkpoint.tree is None:
        raise UserError(f"{folder} has no {TREE}; run medusa-train tree and eval first")
    check_numbers(checkpoint.heads.state_dict(), folder / WEIGHTS)
    report = read_report(folder)
    trained = report["made"]["train"]["result"]
    if checkpoint.adapter:
        check_numbers(_read_adapter(folder), folder / ADAPTER_WEIGHTS)
        if "kl_to_base" not in trained:
            raise UserError(
                f"{folder}: how far the adapter moved the backbone was not measured; run medusa-train train"
            )
    if problem := beyond_limits(trained):
        raise UserError(f"{folder}: {problem}; train with a lower learning_rate or loss_scale, or fewer epochs")
    source = checkpoint.backbone_source
    backbone = backbone or source
    if not is_hub_id(backbone):
        raise UserError(
            f"the heads name the backbone {backbone!r}, which nobody else can load; name its repository on the Hub "
            "with --backbone org/model"
        )
    report = without_paths(report)
    report["setting"]["backbone"] = backbone
    if source != backbone:
        report["setting"]["backbone_copy"] = _last_name(source)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if unknown := sorted(config.keys() & {"auto_map", "architectures"}):
        raise UserError(f"{folder / CONFIG}: key {unknown[0]} is not of heads; remove it")
    config["base_model_name_or_path"] = backbone
    content: dict[str, bytes | Path] = {WEIGHTS: folder / WEIGHTS, TREE: folder / TREE, CONFIG: _json(config)}
    if checkpoint.adapter:
        adapter = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        content[ADAPTER_CONFIG] = _json(adapter | {"base_model_name_or_path": backbone})
        content[ADAPTER_WEIGHTS] = folder / ADAPTER_WEIGHTS
    content["run.json"] = _json(report["made"])
    content |= _report_files(report, folder)
    content[GENERATE] = _custom_generate(repo_id).encode()
    release = Release(repo_id, backbone, config, report, content)
    _check_privacy(release, folder)
    return release


def check_files(folder: Path) -> None:
    """Refuse what this package does not write: pickles, code, links to elsewhere, absurdly large files.

    Raises:
        UserError: such a file, by its name, or no heads at all.
    """
    if not folder.is_dir():
        raise UserError(f"heads {folder}: no such folder")
    if not (folder / CONFIG).exists() and (folder / "heads" / CONFIG).exists():
        raise UserError(f"{folder} is a run; name its heads: {folder / 'heads'}")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path} is a link that leaves the folder; remove it")
        if path.is_dir() and name == ADAPTER:
            continue
        if name not in OURS:
            raise UserError(f"{path} is no file of heads and would be published; move it elsewhere")
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} has {path.stat().st_size / 1e9:.0f} GB; the Hub takes {LARGEST_FILE / 1e9:.0f}")


def check_numbers(tensors: Mapping[str, Tensor], where: Path) -> None:
    """Refuse tensors that are empty or hold NaN or infinity.

    Raises:
        UserError: such a tensor, by its name.
    """
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise UserError(f"{where}: tensor {name} is empty; train again")
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{where}: tensor {name} holds NaN or infinity; train again, with a lower learning_rate")


def _read_adapter(folder: Path) -> dict[str, Tensor]:
    if not (folder / ADAPTER_CONFIG).exists():
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}; copy the whole folder, or train again")
    try:
        tensors: dict[str, Tensor] = load_file(folder / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / ADAPTER_WEIGHTS} is missing or damaged; copy or train it again") from error
    return tensors


def read_report(folder: Path) -> dict[str, Any]:
    """The evaluation of these very heads.

    Raises:
        UserError: there is none, it lacks figures, or it is of other heads.
    """
    path, again = folder.parent / "report.json", "run medusa-train eval"
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        setting, made = report["setting"], report["made"]
        measured = tokens_per_step(report) >= 1 and len(speedups(report)) > 0 and report["losslessness"]
        shape = {key: setting[key] for key in ("kind", "num_heads", "num_layers", "draft_vocab_size")}
        trees = setting["tree_paths"], setting["batch_trees"]
    except OSError as error:
        raise UserError(f"{path} is missing, and heads are not published without figures; {again} first") from error
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged or of another version ({error!r}); {again} again") from error
    if not measured:
        raise UserError(f"{path} lacks tokens per step or a speedup; {again} again with more prompts or tokens")
    checkpoint = load_heads(folder)
    same_heads = shape == {key: getattr(checkpoint.heads.config, key) for key in shape}
    own = checkpoint.tree.to_json()["paths"] if checkpoint.tree else []
    same_trees = trees == (own, {str(rows): tree.to_json()["paths"] for rows, tree in checkpoint.batch_trees.items()})
    trained = folder.parent / "train" / "run.json"
    same_run = not trained.exists() or json.loads(trained.read_text(encoding="utf-8")) == made["train"]
    if not (same_heads and same_trees and same_run):
        raise UserError(f"{path} was measured with other heads or another tree than {folder}; {again} again")
    return report


def without_paths(value: Any, key: str = "") -> Any:
    """JSON with every path from a root, or out of the working folder, cut down to its last name.

    Args:
        key: where the value stands; the sample's texts stay as they are.
    """
    if key in ("sample", "definitions"):
        return value
    if isinstance(value, dict):
        return {name: without_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if _WHOLE_PATH.fullmatch(value):
        return _last_name(value)
    return _PATH_INSIDE.sub(lambda found: _last_name(found[0]), value)


def _last_name(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("/\\"))[-1]


def _report_files(report: dict[str, Any], folder: Path) -> dict[str, bytes | Path]:
    with tempfile.TemporaryDirectory() as made:
        try:
            write_report(Path(made), report)
        except (KeyError, TypeError, StopIteration, jinja2.UndefinedError) as error:
            raise UserError(
                f"the report beside {folder} is of another version; run medusa-train eval --overwrite"
            ) from error
        content = {name: (Path(made) / name).read_bytes() for name in ("report.json", "report.html")}
    return {name: data for name, data in content.items() if name != "report.html" or len(data) <= LARGEST_PAGE}


def _custom_generate(repo_id: str) -> str:
    code = files("medusa_train").joinpath("custom_generate.py").read_text("utf-8")
    return code.replace('HEADS = ""', f"HEADS = {json.dumps(repo_id)}")


def _check_privacy(release: Release, folder: Path) -> None:
    """Refuse to publish the home directory's or the run's place, should either have got through."""
    private = {str(Path.home()), str(folder.parent.resolve())} - {"/"}
    texts = {name: content for name, content in release.files.items() if isinstance(content, bytes)}
    for name, content in (texts | {CARD: release.card({}).encode()}).items():
        if found := next((path for path in private if path.encode() in content), None):
            raise UserError(f"{name} would publish the path {found} of this machine; remove it from the recipe")


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
