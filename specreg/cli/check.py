"""`specreg check`: prove that what a speculator declares is true."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from specreg.capabilities import Capabilities
from specreg.errors import ConfigError

if TYPE_CHECKING:
    from specreg.testing.checks.result import Check, CheckResult
    from specreg.testing.lab import Lab

__all__ = ["check"]

EXIT_NOT_PROVEN = 1
DEFAULT_TPS = (1, 2, 3, 4)
MAX_TP = 8
STYLES = {"proven": "green", "failed": "bold red", "not run": "red", "declared": "yellow"}


def check(
    name: Annotated[str, typer.Argument(help="Speculator, as `specreg list` prints it.")],
    tp: Annotated[
        list[int] | None, typer.Option(help="Ranks to prove it for; give it once a number.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove an installed speculator with tiny models; exit status 1 when a promise is not kept."""
    tps = tuple(sorted(set(tp or DEFAULT_TPS)))
    if not all(1 <= size <= MAX_TP for size in tps):
        raise ConfigError(
            "a speculator cannot be proven for such a number of ranks",
            where="--tp",
            got=f"{tps}; allowed: 1 to {MAX_TP}",
            fix="pass --tp 1 --tp 2, or leave it out for 1, 2, 3 and 4",
        )
    # torch and transformers: not before the arguments have been understood.
    from specreg.testing.checks import CHECKS
    from specreg.testing.lab import Lab
    from specreg.testing.subject import tiny_subject

    with tempfile.TemporaryDirectory() as folder:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
        with Lab(tiny_subject(name, Path(folder)), tps) as lab:
            if max(tps) > 1:
                lab.pool.start(max(tps))  # They import while the first checks run.
            results = list(_run(CHECKS, lab))
            capabilities = lab.capabilities
    is_ok = all(result.is_ok for result in results)
    if as_json:
        print(json.dumps(_as_json(name, tps, results, is_ok)))
    else:
        _print(name, tps, capabilities, results, is_ok)
    if not is_ok:
        raise typer.Exit(EXIT_NOT_PROVEN)


def _run(checks: tuple[Check, ...], lab: Lab) -> Iterator[CheckResult]:
    with _progress() as progress:
        task = progress.add_task("", total=len(checks))
        for each in checks:
            progress.update(task, description=each.name)
            yield each.run(lab)
            progress.advance(task)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar over the checks, on standard error."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


def _as_json(
    name: str, tps: tuple[int, ...], results: list[CheckResult], is_ok: bool
) -> dict[str, Any]:
    return {
        "speculator": name,
        "tps": list(tps),
        "is_ok": is_ok,
        "checks": [
            {
                "check": result.check,
                "status": result.status.value,
                "declared": result.declared,
                "cases": [
                    {"case": case.name, "status": case.status.value, "detail": case.detail}
                    for case in result.cases
                ],
            }
            for result in results
        ],
    }


def _print(
    name: str,
    tps: tuple[int, ...],
    capabilities: Capabilities,
    results: list[CheckResult],
    is_ok: bool,
) -> None:
    console = Console()
    table = Table(title=f"{name}, tp {', '.join(map(str, tps))}", title_justify="left")
    for column in ("check", "declares", "cases", "verdict"):
        table.add_column(column)
    for result in results:
        status = result.status.value
        table.add_row(
            escape(result.check),
            escape(_declares(capabilities, result.check)),
            f"{result.num_proven}/{len(result.cases)}",
            f"[{STYLES[status]}]{status}[/]",
        )
    console.print(table)
    for result in results:
        if result.declared is not None:
            console.print(f"{result.check}: {result.declared}", markup=False, highlight=False)
        elif not result.is_ok:
            for reason in result.reasons:
                console.print(f"{result.check}\n  {reason}", markup=False, highlight=False)
    if is_ok:
        console.print("every promise is kept", style="green")
    else:
        number = sum(not result.is_ok for result in results)
        console.print(f"{number} of {len(results)} checks are not proven", style="bold red")


def _declares(capabilities: Capabilities, check_name: str) -> str:
    """The value of the capability that a check is named after."""
    value = getattr(capabilities, check_name.rpartition(": ")[2], None)
    if value is None:
        return ""
    if isinstance(value, frozenset):
        return ", ".join(sorted(item.value for item in value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(getattr(value, "value", value))
