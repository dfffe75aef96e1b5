"""DSpark with each kind of fused sampler, proven with the kit.

The samplers are those of examples/specreg-markov-samplers, and specreg's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest
from editable_projects import EXAMPLES
from specreg_dspark.random_drafter import random_dspark

from specreg.model_config import read_model_config
from specreg.testing import Lab, SpeculatorConformance, Subject, save_kit_target

sys.path.insert(0, str(EXAMPLES / "specreg-markov-samplers"))

WATCHED = "capabilities: is_cuda_graph_safe"
TWIN = (
    "on a CPU the op asks the host which rows are live; tests/gpu captures its kernels in a graph"
)
REDUCED = 11


def subject_of(name: str, folder: Path, draft_vocab_size: int | None = None) -> Subject:
    target = str(save_kit_target(folder / "target"))
    drafter = random_dspark(
        folder / "draft", read_model_config(target) or {}, draft_vocab_size=draft_vocab_size
    )
    return Subject(
        {**drafter, "num_speculative_tokens": 3, "fused_sampler": name},
        target,
        declared={WATCHED: TWIN},
        plugins=("specreg_dspark", "specreg_markov_samplers"),
    )


class FusedConformance(SpeculatorConformance):
    """All promises of the kit with a sampler of `subject`, and what the plan comes to."""

    verdict: ClassVar[str]
    """Reason of the rule speculator-opts-in at more than one rank."""

    def test_the_plan_and_its_reason(self, specreg_lab: Lab) -> None:
        for tp in (tp for tp in self.tps if tp > 1):
            plan = specreg_lab.run(specreg_lab.plain(tp), "alone").plan
            (opts_in,) = (v for v in plan.verdicts if v.rule == "speculator-opts-in")
            is_sharded = self.verdict.startswith("speculator dspark writes")
            assert plan.num_shards == (tp if is_sharded else 1)
            assert opts_in.reason.startswith(self.verdict.format(tp=tp))
            assert (opts_in.passed is True) == is_sharded

    def test_the_loop_draws_the_same_tokens(self, specreg_lab: Lab, tmp_path: Path) -> None:
        subject = specreg_lab.subject
        loop = {**subject.speculative, "fused_sampling": "off"}
        del loop["fused_sampler"]
        with Lab(Subject(loop, subject.target, plugins=subject.plugins), (2,)) as other:
            for call in ("mixed", "trio"):
                fused = specreg_lab.run(specreg_lab.plain(2), call)
                assert fused.tokens == other.run(other.plain(2), call).tokens


class TestStock(FusedConformance):
    tps = (1, 2)
    verdict = "speculator dspark writes through the owner mask"

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of("markov_sample", tmp_path, REDUCED)


class TestOwnerAware(FusedConformance):
    tps = (2, 4)
    verdict = "speculator dspark writes through the owner mask"

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of("owner_aware", tmp_path)


class TestFullCache(FusedConformance):
    tps = (2, 3, 4)
    verdict = (
        "supports_batch_sharded_draft_logits() of speculator dspark is False: fused sampler "
        "full_cache of specreg_markov_samplers writes the full-size cache"
    )

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of("full_cache", tmp_path)


class TestLying(FusedConformance):
    tps = (1, 2)
    verdict = (
        "supports_batch_sharded_draft_logits() of speculator dspark is False: fused sampler lying "
        "of specreg_markov_samplers declares sharded, but as rank 0 of {tp} it wrote byte 0 of "
        "logits in row 2, step 0, behind the 2 rows of its cache"
    )

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        return subject_of("lying", tmp_path)
