"""`specreg random-drafter`: a drafter with random weights, to run before a trained one exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["random_drafter"]


def random_drafter(
    name: Annotated[str, typer.Argument(help="Speculator, as `specreg list` prints it.")],
    directory: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    target: Annotated[
        str, typer.Option(help="Checkpoint directory, or a known model, that it shall fit.")
    ],
) -> None:
    """Write a randomly initialised drafter; prints the speculative config that runs it."""
    from specreg.testing.random_drafter import save_random_drafter

    print(json.dumps(save_random_drafter(name, directory, target)))
