"""The class that a plugin's author subclasses."""

from __future__ import annotations

from typing import ClassVar

import pytest

from specreg.testing.checks import CHECKS
from specreg.testing.checks.result import Check, Status
from specreg.testing.lab import Lab
from specreg.testing.lab_store import LabStore
from specreg.testing.subject import Subject

__all__ = ["SpeculatorConformance"]


class SpeculatorConformance:
    """Every promise of a speculator as a test.

    Subclass it as `class TestMine(SpeculatorConformance)` and give it one fixture, `subject`, which
    returns the `Subject` to prove; that of the first test is used for all tests of the class, so
    that they share engines. A check that the subject declares impossible is skipped, with the
    reason.

    Attributes:
        tps: numbers of ranks to prove it for.
    """

    tps: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)

    @pytest.fixture
    def subject(self) -> Subject:
        """What to prove; the subclass overrides it."""
        raise NotImplementedError("give the class a fixture `subject` that returns a Subject")

    @pytest.fixture
    def specreg_lab(
        self, request: pytest.FixtureRequest, subject: Subject, specreg_labs: LabStore
    ) -> Lab:
        """Where the tests of this class run the subject."""
        return specreg_labs.lab(request.cls, lambda: subject, self.tps)

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    def test_conformance(self, check: Check, specreg_lab: Lab) -> None:
        result = check.run(specreg_lab)
        if result.status is Status.DECLARED:
            pytest.skip(str(result.declared))
        assert result.is_ok, "\n".join([f"{check.name}: {result.status.value}", *result.reasons])
