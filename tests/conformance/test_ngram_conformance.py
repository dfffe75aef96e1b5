"""The built-in drafter `ngram`, proven with the kit as a stranger's would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from specreg.testing import SpeculatorConformance, Subject, tiny_subject


class TestNgram(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("ngram", tmp_path)
