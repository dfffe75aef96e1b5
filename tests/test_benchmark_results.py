"""A page of results is that of the JSON beside it; a partial run loses no other result."""

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("run")


def test_the_page_is_that_of_the_json(run):
    path = FOLDER / "results" / "nvidia-h200"
    facts = json.loads(path.with_suffix(".json").read_text())
    results = facts.pop("results")
    assert set(results) == set(run.BENCHMARKS)
    assert run.page(facts, results) == path.with_suffix(".md").read_text()


def test_results_of_other_benchmarks_are_kept_unless_they_are_of_other_versions(run, tmp_path):
    path, facts = tmp_path / "device.json", {"device": "one", "torch": "2"}
    assert run.earlier_results(path, facts) == {}
    path.write_text(json.dumps(facts | {"results": {"draft_sample": {"rows": []}}}))
    assert run.earlier_results(path, facts) == {"draft_sample": {"rows": []}}
    assert run.earlier_results(path, facts | {"torch": "3"}) is None


def test_a_partial_run_beside_results_of_other_versions_is_refused(
    run, tmp_path, monkeypatch, capsys
):
    (tmp_path / "one.json").write_text(json.dumps({"device": "one", "torch": "2", "results": {}}))
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "environment", lambda: {"device": "one", "torch": "3"})
    monkeypatch.setattr("sys.argv", ["run.py", "draft_sample", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        run.main()
    assert "of other versions" in capsys.readouterr().err
