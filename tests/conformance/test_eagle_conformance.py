"""EAGLE heads, proven with the kit: the target's vocabulary, a reduced one, and one pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from specreg.testing import SpeculatorConformance, Subject, tiny_subject


class TestEagle1(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("eagle", tmp_path)


class TestEagle3(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("eagle3", tmp_path)


class TestParallel(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("peagle", tmp_path)
