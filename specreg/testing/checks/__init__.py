"""Everything that the kit proves, a small file a group."""

from __future__ import annotations

from collections.abc import Iterator

from specreg.testing.checks import (
    cache,
    checkpoints,
    lossless,
    processes,
    protocol,
    scheduling,
)
from specreg.testing.checks.result import Check, CheckResult
from specreg.testing.lab import Lab

__all__ = ["CHECKS", "run_checks"]

CHECKS: tuple[Check, ...] = (
    *protocol.CHECKS,
    *cache.CHECKS,
    *scheduling.CHECKS,
    *lossless.CHECKS,
    *checkpoints.CHECKS,
    *processes.CHECKS,
)


def run_checks(lab: Lab) -> Iterator[CheckResult]:
    """Run every check, in order; a result as soon as it is there."""
    for check in CHECKS:
        yield check.run(lab)
