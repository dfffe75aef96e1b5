"""LiLiCorr, proven with the kit as a stranger's would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from specreg.testing import SpeculatorConformance, Subject, tiny_subject


class TestLiLiCorr(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("lilicorr", tmp_path)
