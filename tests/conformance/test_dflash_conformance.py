"""The drafters of `method: dflash`, proven with the kit as a stranger's would be."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from specreg_dflash.random_drafter import random_dflash

from specreg.model_config import read_model_config
from specreg.testing import SpeculatorConformance, Subject, save_kit_target, tiny_subject

REDUCED = 11


class TestDFlash(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("dflash", tmp_path)


class TestReducedDFlash(SpeculatorConformance):
    # What differs from the speculator above does not depend on how many ranks there are.
    tps: ClassVar[tuple[int, ...]] = (1, 3)

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        target = str(save_kit_target(tmp_path / "target"))
        config = read_model_config(target) or {}
        drafter = random_dflash(tmp_path / "draft", config, draft_vocab_size=REDUCED)
        return Subject({**drafter, "num_speculative_tokens": 3}, target)


class TestXPress(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("xpress", tmp_path)
