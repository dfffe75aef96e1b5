from __future__ import annotations

import json

import pytest
from toy_plugins import ToyPlugin, capabilities, spec

from specreg.capabilities import DraftLogitsLayout
from specreg.cli import main
from specreg.cli.matrix import MatrixRow, capability_matrix, print_matrix
from specreg.plugin import DraftWatermarkerFactory, RejectionSamplerFactory
from specreg.registry import Registry

DENSE, _, TOP_K = DraftLogitsLayout
PARTS = ToyPlugin(
    name="parts",
    rejection_samplers=[RejectionSamplerFactory("plain", "m:make")],
    draft_watermarkers=[DraftWatermarkerFactory("keyed", "m:make", honors_owner_mask=True)],
)


def matrix(*specs) -> dict[tuple[str, str, str | None], MatrixRow]:
    rows = capability_matrix(Registry.from_plugins([ToyPlugin(*specs), PARTS]))
    by_outcome = {(row.speculator, row.cache, row.layout): row for row in rows}
    return by_outcome


def test_each_speculator_has_one_row_an_outcome_and_every_change_once():
    rows = capability_matrix(Registry.from_plugins([ToyPlugin(spec(), spec("other")), PARTS]))
    assert [row.speculator for row in rows] == sorted(row.speculator for row in rows)
    for name in ("toy", "other"):
        mine = [row for row in rows if row.speculator == name]
        assert len({(row.cache, row.layout, row.rules) for row in mine}) == len(mine)
        changes = [change for row in mine for change in row.when]
        assert len(set(changes)) == len(changes) == 11


def test_a_row_tells_what_the_cache_comes_to_and_which_rule_fails():
    rows = matrix(spec())
    assert rows["toy", "sharded", "dense"].when == ("all on", "layout dense", "watermarker keyed")
    assert rows["toy", "none", None].rules == ("probabilistic-drafts",)
    assert rows["toy", "refused", None].when == ("layout draft_vocab", "layout top_k")


def test_candidates_are_dense_where_the_sampler_reads_nothing_else():
    facts = capabilities(layouts=frozenset({DENSE, TOP_K}), num_candidates=16)
    rows = matrix(spec("toy", capabilities=facts))
    assert "all on" in rows["toy", "sharded", "top_k"].when
    plain = rows["toy", "replicated", "dense"]
    assert (plain.when, plain.rules) == (("sampler plain",), ("stock-rejection-sampler",))


def test_a_speculator_that_a_checkpoint_selects_has_rows_too():
    narrowed = spec("toy", architectures=("AcmeForCausalLM",), needs_checkpoint=True)
    assert matrix(narrowed, spec("wide", methods=("toy",)))["toy", "sharded", "dense"]


def test_the_table_shows_every_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    print_matrix(Registry.from_plugins([ToyPlugin(spec())]), as_json=False)
    shown = capsys.readouterr().out
    assert "greedy drafts" in shown
    assert "batch-sharded-sampling" in shown
    assert shown.count("toy") == 1


def test_a_speculator_without_a_distribution_never_has_a_cache_and_takes_one_line(capsys):
    facts = capabilities(supports_probabilistic=False)
    registry = Registry.from_plugins([ToyPlugin(spec("toy", capabilities=facts))])
    (row,) = capability_matrix(registry)
    assert (row.cache, row.rules) == ("none", ("probabilistic-drafts",))
    print_matrix(registry, as_json=False)
    assert "always" in capsys.readouterr().out


def test_the_command_prints_the_matrix_of_what_is_installed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["list", "--matrix", "--json"])
    (told,) = json.loads(capsys.readouterr().out).items()
    assert told[0] == "matrix"
    assert {"speculator", "distribution", "when", "cache", "layout", "rules"} == set(told[1][0])
    assert "draft_model" in {row["speculator"] for row in told[1]}
