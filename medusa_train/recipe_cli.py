"""``medusa-train recipe``: a new recipe with its keys explained, and the schema that editors complete keys with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Write a recipe, or the schema of one.", no_args_is_help=True)


@app.command()
def new(
    model: Annotated[str, typer.Option("--model", help="Hub id, local folder, .gguf file or pkg://package/file.gguf.")],
    kind: Annotated[
        Literal["medusa", "hydra", "recurrent"],
        typer.Option("--kind", help="hydra, recurrent: more tokens per step, in this package only."),
    ] = "medusa",
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: print it.")] = None,
) -> None:
    """Write a recipe for a model, its keys explained; sizes come from its config, if that is on this machine."""
    from medusa_train.inference.errors import UserError
    from medusa_train.inference.files import write_text
    from medusa_train.new_recipe import choose, find_shape, recipe_text

    if out and out.exists():
        raise UserError(f"--out {out} is there already; name another file")
    shape = find_shape(model)
    if shape:
        sizes = f"{shape.parameters / 1e6:,.0f} M parameters, hidden size {shape.hidden_size:,}"
        heading = [f"For a model of {sizes}, vocabulary {shape.vocab_size:,}."]
    else:
        heading = ["Defaults, since this machine has no config of the model. Write the recipe again after a download."]
    heading.append("Keys that are not here have defaults; recipes/README.md explains all. Next: medusa-train doctor.")
    text = recipe_text(model, choose(shape, kind) if shape else {}, heading)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text(out, text)
    typer.echo(f"recipe            {out}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes."""
    from medusa_train.recipe_reference import schema_json

    typer.echo(schema_json(), nl=False)
