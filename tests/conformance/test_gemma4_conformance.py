"""Gemma 4 assistants, proven with the kit: with a dense head, and with an ordered one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from specreg_mtp.gemma4_random import save_random_assistant

from specreg.model_config import read_model_config
from specreg.testing import SpeculatorConformance, Subject, tiny_subject


class TestGemma4(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("gemma4", tmp_path)


class TestGemma4WithAnOrderedHead(SpeculatorConformance):
    """Most tokens have draft probability 0: each of the 17 is a group of its own, 6 are scored."""

    # What differs from the speculator above does not depend on how many ranks there are.
    tps: ClassVar[tuple[int, ...]] = (1, 3)

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        subject = tiny_subject("gemma4", tmp_path)
        config = read_model_config(subject.target) or {}
        draft = save_random_assistant(tmp_path / "ordered", config, num_centroids=17, top_k=6)
        return replace(subject, speculative={**subject.speculative, "model": str(draft)})
