"""DSpark, proven with the kit as a stranger's would be: all columns, a reduced head, candidates."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from specreg_dspark.random_drafter import random_dspark

from specreg.model_config import read_model_config
from specreg.testing import SpeculatorConformance, Subject, save_kit_target, tiny_subject

REDUCED, NUM_CANDIDATES = 11, 4


class TestDSpark(SpeculatorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return tiny_subject("dspark", tmp_path)


class TestReducedDSpark(SpeculatorConformance):
    """Drafts from mask rows alone, with a recurrent head."""

    # What differs from the speculator above does not depend on how many ranks there are.
    tps: ClassVar[tuple[int, ...]] = (1, 3)

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        target = str(save_kit_target(tmp_path / "target"))
        drafter = random_dspark(
            tmp_path / "draft",
            read_model_config(target) or {},
            draft_vocab_size=REDUCED,
            sample_from_anchor=False,
            markov_head="rnn",
        )
        return Subject({**drafter, "num_speculative_tokens": 3}, target)


class TestCandidatesOfDSpark(SpeculatorConformance):
    """A few columns of a reduced head, behind a gated Markov head."""

    # What differs from the speculator above does not depend on how many ranks there are.
    tps: ClassVar[tuple[int, ...]] = (1, 3)

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        target = str(save_kit_target(tmp_path / "target"))
        drafter = random_dspark(
            tmp_path / "draft",
            read_model_config(target) or {},
            draft_vocab_size=REDUCED,
            markov_head="gated",
        )
        options = {"dspark_draft_topk": NUM_CANDIDATES, "num_speculative_tokens": 3}
        return Subject({**drafter, **options}, target)
