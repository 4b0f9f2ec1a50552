"""The training stage alone, for launchers: ``accelerate launch -m medusa_train.train RECIPE [section.field=value ...]``.

It needs the ``cache`` stage of the same recipe. Every rank runs this file; rank 0 writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse ``RECIPE [overrides] [--overwrite]`` and train."""
    from medusa_train.cli import reporting_errors
    from medusa_train.recipe import load_recipe

    words = list(sys.argv[1:] if arguments is None else arguments)
    overwrite = "--overwrite" in words
    words = [word for word in words if word != "--overwrite"]
    with reporting_errors(debug=False):
        from medusa_train.inference.errors import UserError

        if not words:
            raise UserError("usage: accelerate launch -m medusa_train.train RECIPE [section.field=value ...]")
        from medusa_train.stages import Job, run_stages

        run_stages(Job(load_recipe(words[0], words[1:])), ["train"], overwrite)


if __name__ == "__main__":
    main()
