from __future__ import annotations

import json

import pytest
from fake_distributions import PLUGIN, install

from specreg import registry
from specreg.cli import main


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """One good and one broken distribution beside the built-ins."""
    install(
        tmp_path,
        "listed-good",
        entry_points={"listed": "listed_plugin"},
        modules={"listed_plugin": PLUGIN.replace("{name}", "listed")},
    )
    install(
        tmp_path,
        "listed-bad",
        entry_points={"bad": "listed_bad_plugin"},
        modules={"listed_bad_plugin": "raise OSError('no such luck')"},
        version="0.3",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.get_registry.cache_clear()
    yield
    registry.get_registry.cache_clear()


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code or 0


@pytest.mark.usefixtures("installed")
def test_the_json_listing_has_speculators_and_broken_plugins(capsys):
    assert run("list", "--json") == 0
    listing = json.loads(capsys.readouterr().out)
    assert sorted(listing) == ["broken", "speculators"]
    found = {entry["name"]: entry for entry in listing["speculators"]}
    listed = found["listed"]
    assert listed["methods"] == ["listed"]
    assert (listed["distribution"], listed["version"]) == ("listed-good", "1.0")
    assert listed["architectures"] == []
    assert listed["capabilities"]["style"] == "autoregressive"
    assert listed["capabilities"]["supports_probabilistic"] is True
    assert listed["capabilities"]["layouts"] == ["dense"]
    assert any(entry["distribution"] == "specreg" for entry in listing["speculators"])
    (broken,) = listing["broken"]
    assert (broken["name"], broken["distribution"], broken["version"]) == (
        "bad",
        "listed-bad",
        "0.3",
    )
    assert broken["error"] == "OSError: no such luck"
    assert "Traceback" in broken["traceback"]


@pytest.mark.usefixtures("installed")
def test_the_listing_in_words_shows_the_same(capsys):
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert "listed (listed-good 1.0)" in shown
    assert "BROKEN bad (listed-bad 0.3)" in shown
    assert "OSError: no such luck" in shown


@pytest.mark.usefixtures("installed")
def test_plugins_that_the_environment_leaves_out_are_mentioned(capsys, monkeypatch):
    monkeypatch.setenv("SPECREG_PLUGINS", "")
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert "left out by the environment: listed (listed-good 1.0)" in shown
    assert "no speculator is installed" in shown
