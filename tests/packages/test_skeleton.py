"""What `specreg new` writes, installed and run as it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from editable_projects import install_project
from fresh_environment import FreshEnvironment, build_wheel

from specreg.cli import main
from specreg.cli.new import Kind
from specreg.registry import get_registry
from specreg.testing.tiny_models import save_tiny_model

KINDS = [kind.value for kind in Kind]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Greedy decoding of these weights repeats itself, which is what the skeletons bet on.
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("target"), seed=4))


@pytest.fixture(params=KINDS)
def installed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Name of a skeleton that this process can select."""
    method = f"fresh_{request.param}"
    project = tmp_path / "project"
    assert run("new", method, "--kind", request.param, "--directory", str(project)) == 0
    for path in install_project(project, tmp_path / "site"):
        monkeypatch.syspath_prepend(path)
    get_registry.cache_clear()
    yield method
    get_registry.cache_clear()


def test_a_skeleton_is_listed_and_drafts_losslessly(installed, target, capsys):
    capsys.readouterr()
    assert run("list", "--json") == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["broken"] == []
    assert f"specreg-{installed.replace('_', '-')}" in {
        entry["distribution"] for entry in listing["speculators"]
    }
    generate = ("generate", "--target", target, "--prompt", "abcabcabcab", "--json")
    generate += ("--max-tokens", "24", "--max-model-len", "64")
    speculative = {
        "method": installed,
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    assert run(*generate) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run(*generate, "--speculative-config", json.dumps(speculative)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert answer["plan"]["speculator"] == installed
    assert answer["stats"]["num_accepted_tokens"] > 0


def test_a_skeleton_passes_the_check_as_it_is_written(installed, capsys):
    capsys.readouterr()
    assert run("check", installed, "--tp", "1", "--tp", "2", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert {check["status"] for check in answer["checks"]} == {"proven"}


def test_a_skeleton_builds_into_a_wheel_that_installs(tmp_path):
    project = tmp_path / "project"
    assert run("new", "from_wheel", "--directory", str(project)) == 0
    environment = FreshEnvironment(tmp_path / "venv")
    environment.install(build_wheel(project, tmp_path / "wheel"))
    listing = environment.specreg_json("list")
    assert listing["broken"] == []
    assert "from_wheel" in {entry["name"] for entry in listing["speculators"]}
    tests = environment.pytest(project / "tests", "-k", "protocol")
    assert tests.returncode == 0, tests.stdout
    assert re.search(r"[1-9]\d* passed", tests.stdout)
