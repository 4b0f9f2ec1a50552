"""Training for ``accelerate launch -m medusa_train.train RECIPE [section.field=value ...]``, as ``medusa-train train``.

Missing stages before it are made first. Every rank runs this file; rank 0 writes what belongs to the run.
"""

from __future__ import annotations

import sys

from medusa_train.inference.errors import UserError
from medusa_train.launch import run_recipe
from medusa_train.recipe import load_recipe
from medusa_train.reporting import reporting_errors


def main() -> None:
    """Train the recipe named on the command line; ``--overwrite`` and ``--debug`` as in ``medusa-train train``."""
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--debug")]
    with reporting_errors(debug="--debug" in sys.argv):
        if not words:
            raise UserError("usage: accelerate launch -m medusa_train.train RECIPE [section.field=value ...]")
        recipe = load_recipe(words[0], words[1:])
        run_recipe(recipe, "train", overwrite="--overwrite" in sys.argv)


if __name__ == "__main__":
    main()
