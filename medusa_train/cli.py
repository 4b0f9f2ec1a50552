"""The command line. Imports of torch and transformers wait until a command needs them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.core

import medusa_train
from medusa_train import data_cli, recipe_cli
from medusa_train.reporting import report_usage, reporting_errors

if TYPE_CHECKING:
    from medusa_train.recipe import Recipe


class _Commands(typer.core.TyperGroup):
    """Reports errors of every command in one place, below typer, which would call a Ctrl-C "Aborted"."""

    def invoke(self, ctx: Any) -> Any:
        with reporting_errors(debug=bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Medusa heads for any Hugging Face causal LM: data, training, tree decoding, honest measurement. Stages: "
    "prompts, distill, cache, train, tree, eval; each makes the missing ones before it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(data_cli.app, name="data")
app.add_typer(recipe_cli.app, name="recipe")

QUICKSTART = Path(str(files("medusa_train.recipes"))) / "quickstart.yaml"

RecipeArgument = Annotated[Path, typer.Argument(help="YAML recipe.")]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="section.field=value, any number.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder of the run (output_dir).")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the run.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Make stages of another recipe anew; tree and eval: also measure again.")
]
PlanOption = Annotated[bool, typer.Option("--plan", help="Print the resolved recipe and stop.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(medusa_train.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    pass  # --version acts in its callback, --debug in _Commands


def _load(recipe: Path, overrides: list[str] | None, out: Path | None, seed: int | None = None) -> Recipe:
    """The recipe with every override of the command line."""
    from medusa_train.recipe import load_recipe

    words = list(overrides or ())
    words += [f"output_dir={json.dumps(str(out))}"] if out else []  # quoted: a folder may be called 2024
    words += [f"seed={seed}"] if seed is not None else []
    return load_recipe(recipe, words)


def _run(
    last: str,
    recipe: Path,
    overrides: list[str] | None,
    out: Path | None,
    seed: int | None,
    overwrite: bool,
    plan: bool,
    retry_failed: bool = False,
) -> Path | None:
    """Run the stages up to ``last``; the run's folder, or None if the recipe was only printed."""
    resolved = _load(recipe, overrides, out, seed)
    if plan:
        from medusa_train.recipe import to_yaml

        typer.echo(to_yaml(resolved), nl=False)
        return None
    from medusa_train.launch import run_recipe

    run_recipe(resolved, last, overwrite, retry_failed)
    return Path(resolved.output_dir)


@app.command()
def prompts(
    recipe: RecipeArgument, overrides: OverridesArgument = None, out: OutOption = None, seed: SeedOption = None,
    overwrite: OverwriteOption = False, plan: PlanOption = False,
) -> None:  # fmt: skip
    """Write or read the prompts."""
    _run("prompts", recipe, overrides, out, seed, overwrite, plan)


@app.command()
def distill(
    recipe: RecipeArgument, overrides: OverridesArgument = None, out: OutOption = None, seed: SeedOption = None,
    overwrite: OverwriteOption = False, plan: PlanOption = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Ask prompts again that failed before.")] = False,
) -> None:  # fmt: skip
    """Let the backbone answer the prompts."""
    _run("distill", recipe, overrides, out, seed, overwrite, plan, retry_failed)


@app.command()
def cache(
    recipe: RecipeArgument, overrides: OverridesArgument = None, out: OutOption = None, seed: SeedOption = None,
    overwrite: OverwriteOption = False, plan: PlanOption = False,
) -> None:  # fmt: skip
    """Keep the backbone's hidden states of the answers."""
    _run("cache", recipe, overrides, out, seed, overwrite, plan)


@app.command()
def train(
    recipe: RecipeArgument, overrides: OverridesArgument = None, out: OutOption = None, seed: SeedOption = None,
    overwrite: OverwriteOption = False, plan: PlanOption = False,
) -> None:  # fmt: skip
    """Train the heads in this process; see also accelerate launch -m medusa_train.train."""
    _run("train", recipe, overrides, out, seed, overwrite, plan)


@app.command()
def tree(
    recipe: RecipeArgument, overrides: OverridesArgument = None, out: OutOption = None, seed: SeedOption = None,
    overwrite: OverwriteOption = False, plan: PlanOption = False,
) -> None:  # fmt: skip
    """Choose the tree that is fastest on this device."""
    _run("tree", recipe, overrides, out, seed, overwrite, plan)


@app.command("eval")
def evaluate(
    recipe: RecipeArgument, overrides: OverridesArgument = None, out: OutOption = None, seed: SeedOption = None,
    overwrite: OverwriteOption = False, plan: PlanOption = False,
) -> None:  # fmt: skip
    """Measure on held-out prompts and write the report."""
    _run("eval", recipe, overrides, out, seed, overwrite, plan)


@app.command()
def quickstart(
    overrides: OverridesArgument = None, out: OutOption = None, seed: SeedOption = None,
    overwrite: OverwriteOption = False, plan: PlanOption = False,
    recipe: Annotated[Path, typer.Option("--recipe", help="Another recipe than the built-in one.")] = QUICKSTART,
) -> None:  # fmt: skip
    """Run every stage; by default on a small real model, in minutes on two CPU cores."""
    folder = _run("eval", recipe, overrides, out, seed, overwrite, plan)
    if folder:
        from medusa_train.eval.report import headline

        typer.echo(headline(folder))
        typer.echo(_what_next(folder))


def _what_next(folder: Path) -> str:
    """Commands for a finished run, as they can be pasted where this one was given."""
    from medusa_train.inference.checkpoint import CONFIG
    from medusa_train.model_card import is_hub_id

    command = "medusa-train" if shutil.which("medusa-train") else sys.argv[0]
    heads = folder / "heads"
    source = json.loads((heads / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    backbone = "" if is_hub_id(source) else " --backbone org/model"
    return (
        f"talk with it      {command} chat {shlex.quote(str(heads))}\n"
        f"see its card      {command} publish {shlex.quote(str(heads))} you/name{backbone} --dry-run"
    )


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Run folder or report.json.")],
    b: Annotated[Path, typer.Argument(help="The one that may be better.")],
) -> None:
    """Compare two reports: what got better or worse beyond noise."""
    from medusa_train.eval.compare import compare as compare_reports
    from medusa_train.eval.compare import comparison_text
    from medusa_train.eval.report import read_report

    typer.echo(comparison_text(*compare_reports(read_report(a), read_report(b))))


@app.command()
def lossless(
    target: Annotated[str, typer.Argument(help="Recipe of a finished run, or heads.")],
    overrides: OverridesArgument = None,
    prompts: Annotated[str | None, typer.Option("--prompts", help="For heads: a benchmark, or a file.")] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="For heads.")] = 8,
    temperature: Annotated[float, typer.Option("--temperature", min=0.01, help="Of the sampled half.")] = 1.0,
    samples: Annotated[int, typer.Option("--samples", min=20, help="Continuations of a prompt, each way.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Length of a continuation.")] = 6,
    verifier: Annotated[str, typer.Option("--verifier", help="rejection (exact) or typical (lossy).")] = "rejection",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    out: Annotated[Path | None, typer.Option("--out", help="JSON file for all figures.")] = None,
) -> None:
    """Check that heads change nothing: greedy outputs token by token, sampled ones by tests of their distribution."""
    from medusa_train.eval.bench import check_name
    from medusa_train.inference.errors import UserError
    from medusa_train.inference.files import write_json
    from medusa_train.lossless import check_lossless, lossless_text

    if out and out.is_dir():
        raise UserError(f"--out {out} is a folder; name a JSON file for the figures")
    check_name("--verifier", verifier, ("rejection", "typical"))
    check_name("--dtype", dtype, ("float32", "bfloat16", "float16"))
    result, folder = check_lossless(
        target, overrides or (), prompts, num_prompts, temperature, samples, tokens, cast(Any, verifier), dtype
    )
    typer.echo(lossless_text(result))
    if out:
        write_json(out, result)
    if folder:
        typer.echo(f"figures           {folder / 'lossless.json'}, and in the run's report")


@app.command()
def cost(
    run: Annotated[Path, typer.Argument(help="Folder of an evaluated run.")],
    price: Annotated[float, typer.Option("--price", min=0, help="Of the machine, per hour.")],
    bandwidth: Annotated[float, typer.Option("--bandwidth", min=1e-3, help="Of its memory, GB/s.")],
    watts: Annotated[float | None, typer.Option("--watts", min=0, help="That it draws while decoding.")] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            "--efficiency", min=0.01, max=1.0,
            help="For another machine than the run's: share of the bandwidth that a plain step reaches.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Estimate tokens/s, cost and energy of a million tokens from a run's figures, with every assumption."""
    from medusa_train.eval.cost import Machine, cost_of_run, cost_table
    from medusa_train.eval.report import read_report
    from medusa_train.eval_stage import add_to_report, heads_hash

    result = cost_of_run(read_report(run), Machine(price, bandwidth * 1e9, watts, efficiency))
    typer.echo(cost_table(result))
    if (run / "heads").is_dir():
        add_to_report(run, heads_hash(run / "heads"), "cost", result)


@app.command()
def doctor(
    recipe: RecipeArgument, overrides: OverridesArgument = None, out: OutOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file for all figures and findings.")] = None,
) -> None:  # fmt: skip
    """Say what a run will need and what looks wrong, before it starts; exit code 2 if a stage would fail."""
    from medusa_train.inference.errors import UserError

    if json_file and json_file.is_dir():
        raise UserError(f"--json {json_file} is a folder; name a file")
    resolved = _load(recipe, overrides, out)
    from medusa_train.doctor import examine
    from medusa_train.doctor_report import show
    from medusa_train.inference.files import write_json

    report = examine(resolved)
    show(report)
    if json_file:
        write_json(json_file, report.to_json())
    if report.failed:
        raise typer.Exit(2)


PromptOption = Annotated[str, typer.Option("--prompt", "-p", help="What the user says.")]
HeadsArgument = Annotated[str, typer.Argument(help="Folder or Hub repository of heads.")]
BackboneOption = Annotated[str | None, typer.Option("--backbone", help="Another source than the heads' config names.")]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1)]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")]
DrafterOption = Annotated[str, typer.Option("--drafter", help="medusa, adaptive, medusa-lookup, lookup or plain.")]
CompileOption = Annotated[bool, typer.Option("--compile", help="Compile the backbone's passes first.")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub repository.")]
ColorOption = Annotated[bool, typer.Option("--color", help="Colour the tokens that heads drafted.")]


@app.command()
def generate(
    heads: HeadsArgument,
    prompt: PromptOption,
    backbone: BackboneOption = None,
    revision: RevisionOption = None,
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    drafter: DrafterOption = "medusa",
    compile_steps: CompileOption = False,
    color: ColorOption = False,
) -> None:
    """Answer one prompt."""
    from medusa_train.chat import Chat

    chat = Chat(heads, backbone, drafter, compile_steps, revision)
    chat.answer([{"role": "user", "content": prompt}], max_new_tokens, temperature, seed, color)


@app.command("chat")
def chat_command(
    heads: HeadsArgument,
    backbone: BackboneOption = None,
    revision: RevisionOption = None,
    max_new_tokens: TokensOption = 512,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    drafter: DrafterOption = "medusa",
    compile_steps: CompileOption = False,
    color: ColorOption = True,
    metrics_port: Annotated[int | None, typer.Option("--metrics-port", help="Serve Prometheus metrics here.")] = None,
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends it."""
    from medusa_train.chat import Chat

    chat, messages = Chat(heads, backbone, drafter, compile_steps, revision), []
    if metrics_port is not None:
        _serve_metrics(chat.totals, metrics_port)
    while True:
        try:
            said = input("you: ").strip()
        except EOFError:
            said = ""
        if not said:
            return
        messages.append({"role": "user", "content": said})
        answer = chat.answer(messages, max_new_tokens, temperature, seed, color)
        messages.append({"role": "assistant", "content": answer})


def _serve_metrics(stats: Any, port: int) -> None:
    from medusa_train.inference.errors import UserError

    try:
        from medusa_train.inference.telemetry import serve_metrics
    except ImportError as error:
        raise UserError("--metrics-port needs prometheus_client; run: pip install 'medusa-train[metrics]'") from error
    try:
        serve_metrics(stats, port)
    except OSError as error:
        raise UserError(f"--metrics-port {port}: {error.strerror}; choose another port") from error


@app.command("export")
def export_command(
    heads: HeadsArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    to: Annotated[str, typer.Option("--to", help="vllm, tgi or fasterdecoding.")],
    backbone: Annotated[
        str | None, typer.Option("--backbone", help="Name to write into the config, if the heads' own is not right.")
    ] = None,
    pad_vocabulary: Annotated[
        bool, typer.Option("--pad-vocabulary", help="Carry a reduced draft vocabulary: the same drafts, larger files.")
    ] = False,
) -> None:
    """Write heads as vLLM, TGI or FasterDecoding/Medusa load them."""
    from medusa_train.eval.bench import check_name
    from medusa_train.formats import NAMES, export_heads

    check_name("--to", to, NAMES)
    for line in export_heads(heads, out, cast(Any, to), backbone or "", pad_vocabulary):
        typer.echo(line)
    typer.echo(f"heads             {out}")


@app.command("import")
def import_command(
    source: Annotated[str, typer.Argument(help="Folder or Hub repository of vLLM, TGI or FasterDecoding heads.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    backbone: Annotated[
        str | None, typer.Option("--backbone", help="Whose heads these are; checks and remembers it.")
    ] = None,
) -> None:
    """Make a checkpoint of heads that another tool trained."""
    from medusa_train.import_heads import import_heads
    from medusa_train.inference.backbone import load_backbone

    for line in import_heads(source, out, load_backbone(backbone) if backbone else None):
        typer.echo(line)
    typer.echo(f"heads             {out}")


@app.command("publish")
def publish_command(
    heads: Annotated[Path, typer.Argument(help="heads of a finished run.")],
    repo: Annotated[str, typer.Argument(help="user/repository on the Hugging Face Hub.")],
    backbone: Annotated[
        str | None, typer.Option("--backbone", help="The backbone's repository, if the run used a copy of it.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; default: private.")] = False,
    revision: Annotated[str, typer.Option("--revision", help="Branch, made if missing.")] = "main",
    message: Annotated[str | None, typer.Option("--commit-message", help="Title of the commit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and the card, and stop.")] = False,
) -> None:
    """Publish heads with their card and figures; the token is HF_TOKEN or that of hf auth login."""
    from medusa_train.publish import publish

    for line in publish(heads, repo, backbone or "", public, revision, message or "", dry_run):
        typer.echo(line)


@app.command()
def bench(
    heads: Annotated[str | None, typer.Argument(help="Folder or Hub repository of heads.")] = None,
    backbone: BackboneOption = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="Small model for the arms that use one.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompts", help="JSON lines: prompt, messages or turns, and category if known.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="The first ones; default: all.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=2, help="Budget of each prompt; default: 128.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds that count.")] = 3,
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", help="Such as 1,2,4,8.")] = "1",
    arms: Annotated[
        str | None,
        typer.Option("--arms", help="Such as generate,plain,medusa; default: all. ARM+compiled: with compiled steps."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    simulate_shape: Annotated[
        str | None,
        typer.Option(
            "--simulate-shape",
            help="Instead of HEADS: random weights shaped as tiny, smollm2-135m, llama-3.2-1b or llama-3-8b.",
        ),
    ] = None,
    accepted_histogram: Annotated[
        str | None,
        typer.Option(
            "--accepted-histogram",
            help="Share of simulated steps that accept 0, 1, 2, ... drafts; default: 0.5,0.3,0.2.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="JSON file for all figures; with it, the same command goes on after a kill."),
    ] = None,
) -> None:
    """Compare ways of decoding on your prompts, or see what a step costs at a size of model."""
    from medusa_train.bench import bench_heads
    from medusa_train.eval.bench import check_name, parse_batch_sizes
    from medusa_train.eval.simulate import SHAPES, parse_histogram, simulate, simulation_table
    from medusa_train.inference.errors import UserError
    from medusa_train.inference.files import write_json
    from medusa_train.run_folder import environment

    check_name("--dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
    sizes = parse_batch_sizes(batch_sizes)
    if out and out.is_dir():
        raise UserError(f"--out {out} is a folder; name a JSON file")
    kept = out.with_name(f"{out.name}.answers.jsonl") if out else None
    if simulate_shape:
        foreign = {
            "HEADS": heads, "--backbone": backbone, "--draft-model": draft_model, "--prompts": prompt_file,
            "--num-prompts": num_prompts, "--max-new-tokens": max_new_tokens, "--arms": arms,
        }  # fmt: skip
        if given := [name for name, value in foreign.items() if value is not None]:
            raise UserError(f"--simulate-shape times random weights and takes no {given[0]}; leave one of them out")
        check_name("--simulate-shape", simulate_shape, SHAPES)
        histogram = parse_histogram(accepted_histogram or "0.5,0.3,0.2")
        result = simulate(simulate_shape, histogram, sizes, repeats, dtype)
        table = simulation_table(result)
    else:
        if accepted_histogram:
            raise UserError("--accepted-histogram goes with --simulate-shape; acceptance of real heads is measured")
        if heads is None or prompt_file is None:
            raise UserError("name HEADS and --prompts FILE.jsonl to compare arms, or a --simulate-shape")
        result, table = bench_heads(
            heads, backbone, draft_model, prompt_file, num_prompts, max_new_tokens or 128, repeats, sizes, arms, dtype,
            kept,
        )  # fmt: skip
    typer.echo(table)
    if out and kept:
        write_json(out, result | {"environment": environment()})
        kept.unlink(missing_ok=True)
        typer.echo(f"figures: {out}")


def main() -> None:
    """Entry point of the ``medusa-train`` command; ``--debug`` anywhere on the line shows tracebacks."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A stable sort on one key: --debug may stand anywhere, typer wants a global option in front.
    words = sorted(sys.argv[1:], key=lambda word: word != "--debug")
    try:
        # Alone, typer would draw a box around what is wrong with a line of words.
        sys.exit(app(args=words, standalone_mode=False))
    except typer.TyperException as error:
        report_usage(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
