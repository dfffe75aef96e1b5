"""The built-in drafters of MTP modules, proven with the kit as a stranger's would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from specreg.testing import SpeculatorConformance, Subject, tiny_subject


class TestSingleModule(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("mtp", tmp_path)


class TestMultiModule(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("multi_module_mtp", tmp_path)
