"""The application: every command, and how an error ends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import typer

from specreg.cli.check import check
from specreg.cli.generate import generate
from specreg.cli.list import list_speculators
from specreg.cli.new import new
from specreg.cli.plan import plan
from specreg.cli.random_drafter import random_drafter
from specreg.errors import SpecregError

__all__ = ["main"]

EXIT_ERROR = 1

app = typer.Typer(
    help="Speculators as plugins, with a sharded draft-logits cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("check")(check)
app.command("generate")(generate)
app.command("list")(list_speculators)
app.command("new")(new)
app.command("plan")(plan)
app.command("random-drafter")(random_drafter)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, 1 on a `SpecregError`, 2 on wrong usage.

    An error is told on standard error; with `--json` it is also an object on standard output.

    Args:
        arguments: without the program's name; None takes `sys.argv`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given, prog_name="specreg")
    except SpecregError as error:
        if "--json" in given:
            parts = {"what": error.what, "where": error.where, "got": error.got, "fix": error.fix}
            print(json.dumps({"error": {"code": error.code, **parts}}))
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from None
