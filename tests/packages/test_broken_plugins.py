"""Broken plugins beside good ones: what becomes of each, in any order of installation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from editable_projects import EXAMPLES, install_project, projects

# For each order: forget what was imported, load, and tell what is there and what asking gives.
PROBE = """
import importlib, json, random, sys
from specreg.config import SpeculativeConfig
from specreg.errors import SpecregError
from specreg.registry import load

paths, methods = json.loads(sys.argv[1]), json.loads(sys.argv[2])
base, before, generator, outcomes = list(sys.path), set(sys.modules), random.Random(0), []

def ask(registry, method, **keys):
    try:
        config = SpeculativeConfig.parse({"method": method, "num_speculative_tokens": 2, **keys})
        return registry.select(config).distribution
    except SpecregError as error:
        return f"{error.code}: {error.got}"

for order in range(60):
    in_order = sorted(paths, reverse=order == 1)
    shuffled = in_order if order < 2 else generator.sample(paths, len(paths))
    sys.path[:] = [path for pair in shuffled for path in pair] + base
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()
    registry = load({})
    outcome = {
        "speculators": [[e.spec.name, e.distribution] for e in registry.speculators],
        "broken": sorted([p.source.name, p.source.distribution, p.error] for p in registry.broken),
        "asked": {method: ask(registry, method) for method in methods},
        "pinned": ask(registry, "suffix_counts", plugin="specreg-example"),
    }
    outcomes.append(outcome)
print(json.dumps({"first": outcomes[0], "equal": sum(o == outcomes[0] for o in outcomes)}))
"""
METHODS = (
    "wants_absent",
    "calls_exit",
    "wants_config",
    "from_the_future",
    "suffix_counts",
    "careless",
    "full_cache",
    "carless",
)
ERRORS = {
    "wants_absent": "No module named 'a_package_that_is_not_installed'",
    "calls_exit": "SystemExit: this plugin needs another machine",
    "wants_config": "config",
    "from_the_future": "1000; allowed: 1 to 1",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    paths = [
        install_project(project, tmp_path_factory.mktemp(name))
        for name, project in projects().items()
    ]
    arguments = (json.dumps(paths), json.dumps(METHODS))
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_order_of_installation_changes_nothing(found):
    assert found["equal"] == 60


def test_the_good_ones_load_beside_the_broken_ones(found):
    speculators = [tuple(entry) for entry in found["first"]["speculators"]]
    assert ("suffix_counts", "specreg-example") in speculators
    assert ("draft_model", "specreg") in speculators


def test_each_broken_one_is_remembered_with_its_own_error(found):
    broken = {name: (distribution, error) for name, distribution, error in found["first"]["broken"]}
    assert set(broken) == set(ERRORS)
    for name, (distribution, error) in broken.items():
        assert distribution.startswith("broken-")
        assert ERRORS[name] in error


@pytest.mark.parametrize("method", ERRORS)
def test_asking_for_a_broken_one_shows_its_error_and_takes_nothing_else(found, method):
    answer = found["first"]["asked"][method]
    assert answer.startswith("broken-plugin: ")
    assert ERRORS[method] in answer


def test_a_name_that_two_distributions_serve_names_both_and_can_be_pinned(found):
    answer = found["first"]["asked"]["suffix_counts"]
    assert answer.startswith("ambiguous-speculator: ")
    assert "broken-duplicate" in answer
    assert "specreg-example" in answer
    assert found["first"]["pinned"] == "specreg-example"


def test_a_misspelt_method_lists_known_and_failed_plugins(found):
    answer = found["first"]["asked"]["carless"]
    assert answer.startswith("unknown-method: ")
    assert "'careless'" in answer
    assert all(error in answer for error in ERRORS.values())


def test_those_that_only_misbehave_later_load(found):
    asked = found["first"]["asked"]
    assert asked["careless"] == "broken-owner-mask"
    assert asked["full_cache"] == "broken-full-cache"


def test_the_table_of_broken_plugins_lists_every_folder_with_its_method():
    page = (EXAMPLES / "broken-plugins" / "README.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", page, flags=re.MULTILINE)
    folders = {path.name for path in (EXAMPLES / "broken-plugins").iterdir() if path.is_dir()}
    assert {folder for folder, _ in listed} == folders
    assert {method for _, method in listed} <= set(METHODS)
