"""`specreg check`: a table for people, an object and an exit status for CI."""

from __future__ import annotations

import json

import pytest

from specreg.cli import main
from specreg.testing import checks
from specreg.testing.checks.result import Check, failed, passed

QUICK = Check("capabilities: layouts", lambda lab: [passed("dense")])
BROKEN = Check("seeds: none", lambda lab: [passed("tp 1"), failed("tp 2", "draws differ")])


@pytest.fixture
def only(monkeypatch):
    def only(*few):
        monkeypatch.setattr(checks, "CHECKS", few)

    return only


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    return ended.value.code, capsys.readouterr()


def test_a_speculator_that_keeps_its_promises_passes(only, capsys):
    only(QUICK)
    code, output = run(capsys, "ngram", "--tp", "1")
    assert code == 0
    assert "every promise is kept" in output.out


def test_a_broken_promise_is_explained_and_ends_with_status_1(only, capsys):
    only(QUICK, BROKEN)
    code, output = run(capsys, "ngram", "--tp", "1")
    assert code == 1
    assert "tp 2: draws differ" in output.out
    assert "1 of 2 checks are not proven" in output.out


def test_the_object_holds_every_case(only, capsys):
    only(QUICK, BROKEN)
    code, output = run(capsys, "draft_model", "--tp", "2", "--tp", "1", "--json")
    report = json.loads(output.out)
    assert code == 1
    assert report["tps"] == [1, 2]
    assert not report["is_ok"]
    assert report["checks"][1] == {
        "check": "seeds: none",
        "status": "failed",
        "declared": None,
        "cases": [
            {"case": "tp 1", "status": "proven", "detail": ""},
            {"case": "tp 2", "status": "failed", "detail": "draws differ"},
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nobody"], "there is no speculator 'nobody'"), (["ngram", "--tp", "0"], "allowed: 1 to 8")],
)
def test_what_cannot_be_checked_is_refused(capsys, arguments, message):
    code, output = run(capsys, *arguments)
    assert code == 1
    assert message in output.err
