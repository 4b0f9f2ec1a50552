"""Every shell block of the documentation runs here on a tiny model, or says why not; what it names exists.

A block that is not run has `<!-- not run: reason -->` in the line before it; the others consist of `medusa-train` and
`cp`.
"""

import io
import json
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser

from medusa_train.cli import app
from medusa_train.job import Job
from medusa_train.recipe import Recipe, _known_keys, load_recipe
from medusa_train.stages import run_stages

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md", *ROOT.glob("docs/*.md"))]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
INLINE = re.compile(r"(?<!`)`(medusa-train [^`\n]+)`(?!`)")
FOLDERS = ("recipes", "docs", "scripts", "benchmarks", "tests", "data", "inference", "eval", "medusa_train")


class Block(NamedTuple):
    page: str
    language: str
    reason: str | None
    code: str

    @property
    def commands(self):
        """The words of every command; comments are gone, continued lines are joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


BLOCKS = [
    Block(str(page.relative_to(ROOT)), match["language"], match["reason"], match["code"])
    for page in PAGES
    for match in FENCE.finditer(page.read_text(encoding="utf-8"))
]
SHELL = [block for block in BLOCKS if block.language == "bash"]
RUN = [block for block in SHELL if block.reason is None]


def name_of(block):
    return f"{block.page}: {block.code.splitlines()[0].split('#')[0].strip()}"


def find_command(words):
    """The command that words call, and what is left for it."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options_of(command):
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def test_every_block_names_its_language_so_that_none_escapes():
    assert {block.language for block in BLOCKS} <= {"bash", "python", "yaml", "json"}
    assert len(RUN) >= 10


@pytest.mark.parametrize("block", SHELL, ids=name_of)
def test_commands_options_keys_and_files_of_a_block_exist(block):
    for words in block.commands:
        if words[0] == "medusa-train":
            command, rest = find_command(words[1:])
            with suppress(click.exceptions.Exit):  # --help
                command.make_context(command.name, list(rest))
        if words[:2] == ["accelerate", "launch"]:
            known = [re.sub(r"^\$\w+$", "1", word) for word in words[2:]]
            parsed, unknown = launch_command_parser().parse_known_args(known)
            assert (parsed.module, unknown) == (True, [])
            assert parsed.training_script in ("medusa_train.train", "medusa_train.cli")
            if parsed.training_script == "medusa_train.cli":
                find_command(parsed.training_script_args)
        for word in words:
            if re.fullmatch(r"[a-z]+\.\w+=.*", word):
                assert word.partition("=")[0] in _known_keys(Recipe), word
            if "/" in word and word.partition("/")[0] in FOLDERS:
                assert (ROOT / word).exists(), word


def test_what_is_no_shell_is_what_it_says():
    for block in BLOCKS:
        if block.language == "python":
            compile(block.code, block.page, "exec")
        elif block.language == "json":
            assert all(json.loads(line) for line in block.code.splitlines())
        elif block.language == "yaml":
            least = {"output_dir": "out", "backbone": {"source": "model"}}
            Recipe.model_validate(least | yaml.safe_load(block.code))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "docs"], ids=lambda page: page.name)
def test_links_outside_the_site_lead_somewhere(page):
    """Those inside it are checked by `mkdocs build --strict`."""
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_inside_sentences_exist(page):
    for line in INLINE.findall(page.read_text(encoding="utf-8")):
        first, *rest = line.removeprefix("medusa-train ").split()
        for name in first.split("|"):
            command, left = find_command([name, *rest])
            for word in left:
                if word.startswith("--"):
                    assert word.partition("=")[0] in options_of(command) | {"--debug"}, line


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_chat_folder):
    """A folder with what the documentation's user has: recipes, mine.yaml and two finished runs of a tiny model."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    questions = [f"what is {number} and {number * 7 % 50} ?" for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    recipe = {
        "output_dir": "runs/mine",
        "backbone": {"source": str(tiny_chat_folder), "dtype": "float32", "device": "cpu"},
        "heads": {"num_heads": 2, "draft_vocab_size": 0},
        "data": {
            "prompts": "prompts.jsonl", "num_prompts": 40, "max_new_tokens": 12, "calibration_share": 0.2,
            "heldout_share": 0.2,
        },
        "training": {"num_train_epochs": 1},
        "inference": {"tree_sizes": [1, 4], "step_time_rounds": 1, "step_time_steps": 1},
        "eval": {"num_prompts": 2, "max_new_tokens": 8, "repeats": 2},
    }  # fmt: skip
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_stages(Job(load_recipe("mine.yaml")), "eval", overwrite=False)
    for name in ("other", "quickstart"):
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / name)
    return folder


@pytest.mark.parametrize("block", RUN, ids=name_of)
def test_a_block_runs(block, command, workplace, monkeypatch, tmp_path):
    shutil.copytree(workplace, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr("sys.stdin", io.StringIO("what is 3 ?\n"))
    for words in block.commands:
        if words[0] == "cp":
            shutil.copy(*words[1:])
            continue
        assert words[0] == "medusa-train", f"{words[0]} cannot be run here; say why in <!-- not run: ... -->"
        code, _, error = command(*words[1:])
        assert code == 0, error
