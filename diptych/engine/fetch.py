"""`python -m diptych.engine.fetch [MODEL]`: fetches and converts a model, with bars, and prints where it
lies."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from diptych.domain.errors import DiptychError
from diptych.engine import catalog
from diptych.engine.progress import Bars


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 with one line on stderr that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m diptych.engine.fetch", description=__doc__)
    names = f"{catalog.DEFAULT}, {catalog.TOY}, a directory, a .gguf file, or ORG/NAME on the hub"
    parser.add_argument("model", nargs="?", default=catalog.DEFAULT, help=names)
    model: str = parser.parse_args(arguments).model
    console = Console(stderr=True)
    try:
        with Bars(console) as progress:
            found = catalog.resolve(model, progress)
    except DiptychError as error:
        console.print(f"diptych: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    sys.stdout.write(f"{found.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
