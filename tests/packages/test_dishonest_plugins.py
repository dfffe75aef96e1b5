"""Plugins that load and then do something else than they declare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from editable_projects import install_project, projects

from specreg.cli import main
from specreg.errors import PolicyError
from specreg.registry import get_registry
from specreg.testing import CHECKS, Lab, tiny_subject
from specreg.testing.checks.result import Status


@pytest.fixture(autouse=True)
def installed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    found = projects()
    for name in ("specreg-example", "broken-owner-mask", "broken-full-cache"):
        for path in install_project(found[name], tmp_path_factory.mktemp(name)):
            monkeypatch.syspath_prepend(path)
    get_registry.cache_clear()
    yield
    get_registry.cache_clear()


@pytest.fixture
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    """Two ranks, for the speculator that the parameter names."""
    with Lab(tiny_subject(request.param, tmp_path), tps=(2,)) as made:
        yield made


@pytest.mark.parametrize("lab", ["careless"], indirect=True)
def test_a_writer_past_the_owner_mask_fails_and_is_told_which_byte_of_which_row(lab):
    (check,) = [check for check in CHECKS if "owned requests are written" in check.name]
    failed = [case for case in check.run(lab).cases if case.status is Status.FAILED]
    assert failed
    assert "wrote" in failed[0].detail
    assert "byte" in failed[0].detail
    assert "of row 0 (slot 1), step 0" in failed[0].detail


@pytest.mark.slow
def test_the_check_of_it_fails_and_names_what_is_not_proven(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "careless", "--tp", "2", "--json"])
    assert ended.value.code == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    failed = [check["check"] for check in checks if check["status"] == "failed"]
    assert any("owned requests are written" in name for name in failed)


@pytest.mark.parametrize("lab", ["suffix_counts"], indirect=True)
def test_the_speculator_that_it_is_derived_from_passes(lab):
    (check,) = [check for check in CHECKS if "owned requests are written" in check.name]
    assert {case.status for case in check.run(lab).cases} == {Status.PROVEN}


@pytest.mark.parametrize("lab", ["full_cache"], indirect=True)
def test_a_sampler_of_the_full_cache_keeps_it_replicated_and_the_plan_says_why(lab):
    plan = lab.run(lab.plain(2), "alone").plan
    assert plan is not None
    assert (plan.num_shards, plan.rows_per_rank) == (1, plan.max_num_seqs)
    (verdict,) = plan.failed_verdicts
    assert verdict.rule == "speculator-opts-in"
    assert "supports_batch_sharded_draft_logits() of speculator full_cache" in verdict.reason
    with pytest.raises(PolicyError, match="where: speculator-opts-in"):
        lab.run(lab.plain(2, sharding="require"), "alone")
