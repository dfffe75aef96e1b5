"""What the plugin declares, proven by the kit of specreg: a test a promise."""

from __future__ import annotations

import pytest

from specreg.testing import SpeculatorConformance, Subject, tiny_subject


class TestSuffixCounts(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        return tiny_subject("suffix_counts", tmp_path_factory.mktemp("subject"))
