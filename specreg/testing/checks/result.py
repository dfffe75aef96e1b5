"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from specreg.errors import SpecregError
from specreg.testing.lab import Lab

__all__ = [
    "Case",
    "Check",
    "CheckResult",
    "Status",
    "failed",
    "not_run",
    "passed",
    "told",
    "verdict",
]


class Status(str, Enum):
    """Outcome of a case or of a whole check."""

    PROVEN = "proven"
    FAILED = "failed"
    NOT_RUN = "not run"
    DECLARED = "declared"


@dataclass(frozen=True)
class Case:
    """One combination that a check looks at.

    Attributes:
        name: such as `"tp 2, dense, standard"`.
        status: proven, failed, or not run.
        detail: why it failed or did not run; empty when proven.
    """

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Check:
    """Something that the kit proves.

    Attributes:
        name: group and promise, such as `"cache: only owned rows are written"`.
        cases: runs them; what it raises is one failed case.
    """

    name: str
    cases: Callable[[Lab], Iterable[Case]]

    def run(self, lab: Lab) -> CheckResult:
        """Run every case. Never raises for what the speculator did."""
        return CheckResult(
            self.name, tuple(self._guarded(lab)), lab.subject.declared.get(self.name)
        )

    def _guarded(self, lab: Lab) -> Iterator[Case]:
        try:
            yield from self.cases(lab)
        except Exception as error:
            yield failed("run", told(error))


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        check: its name.
        cases: what it looked at.
        declared: the author's reason why it cannot be proven; None when there is none.
    """

    check: str
    cases: tuple[Case, ...]
    declared: str | None = None

    @property
    def status(self) -> Status:
        """Failed when a case failed, or did not run; a declared check cannot fail."""
        bad = [case for case in self.cases if case.status is not Status.PROVEN]
        if bad or not self.cases:
            if self.declared is not None:
                return Status.DECLARED
            has_failed = any(case.status is Status.FAILED for case in bad)
            return Status.FAILED if has_failed else Status.NOT_RUN
        return Status.PROVEN

    @property
    def is_ok(self) -> bool:
        """Whether a build may go on."""
        return self.status in (Status.PROVEN, Status.DECLARED)

    @property
    def num_proven(self) -> int:
        """Cases that are proven."""
        return sum(case.status is Status.PROVEN for case in self.cases)

    @property
    def reasons(self) -> list[str]:
        """What is wrong, a line a case."""
        return [f"{c.name}: {c.detail}" for c in self.cases if c.status is not Status.PROVEN]


def told(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, SpecregError):
        return f"[{error.code}] {error.what}; {error.where}: {error.got}"
    return f"{type(error).__name__}: {error}"


def passed(name: str) -> Case:
    """A case that is proven."""
    return Case(name, Status.PROVEN)


def failed(name: str, detail: str) -> Case:
    """A case that is refuted."""
    return Case(name, Status.FAILED, detail)


def not_run(name: str, detail: str) -> Case:
    """A case that nothing is known about."""
    return Case(name, Status.NOT_RUN, detail)


def verdict(name: str, problems: Iterable[str]) -> Case:
    """Proven without problems; otherwise refuted by the first of them."""
    found = list(problems)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return failed(name, found[0] + more) if found else passed(name)
