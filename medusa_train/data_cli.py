"""``medusa-train data``: looking at data and publishing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at data, and publish it.", no_args_is_help=True)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="Run folder, recipe, rows.jsonl, or a file or data set of chats.")],
    backbone: Annotated[
        str | None, typer.Option("--backbone", help="Whose tokenizer and chat template; a run's rows know theirs.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows to print, with what is learnt in colour.")] = 3,
    self_consistency: Annotated[
        int, typer.Option("--self-consistency", min=0, help="Rows to compare with the backbone's greedy choices.")
    ] = 0,
    split: Annotated[str, typer.Option("--split", help="Split of a data set.")] = "train",
    html: Annotated[Path | None, typer.Option("--html", help="Page to write.")] = None,
) -> None:
    """Say what is in a data set, and show exactly what will be learnt."""
    from medusa_train.inference.errors import UserError

    if html and html.is_dir():
        raise UserError(f"--html {html} is a folder; name a file")
    from medusa_train.inspection import find_dataset, show, write_page
    from medusa_train.inspection import inspect as look

    dataset = find_dataset(target, backbone, split)
    summary, consistency = look(dataset, rows, self_consistency)
    show(dataset, summary, consistency, rows)
    if html:
        write_page(html, dataset, summary, consistency, rows)
        typer.echo(f"page: {html}")


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    repo: Annotated[str, typer.Argument(help="user/repository on the Hub.")],
    licence: Annotated[str, typer.Option("--license", help="Licence of the texts, as apache-2.0.")] = "unknown",
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a new repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show files and card, send nothing.")] = False,
) -> None:
    """Put a run's rows on the Hugging Face Hub as a dataset, with a card; HF_TOKEN holds the token."""
    from medusa_train.data_push import push as push_rows

    for line in push_rows(run, repo, licence, public, dry_run):
        typer.echo(line)
