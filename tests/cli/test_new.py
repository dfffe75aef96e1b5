from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from specreg.cli import main
from specreg.cli.new import Kind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FILES = {
    "README.md",
    "pyproject.toml",
    "specreg_my_drafter/__init__.py",
    "specreg_my_drafter/speculator.py",
    "tests/test_conformance.py",
}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["new", *arguments])
    return int(ended.value.code or 0)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", [kind.value for kind in Kind])
@pytest.mark.parametrize("name", ["my_drafter", "my-drafter"])
def test_a_skeleton_is_written_with_every_placeholder_filled(kind, name, tmp_path, capsys):
    folder = tmp_path / "made" / "here"
    assert run(name, "--kind", kind, "--directory", str(folder), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "my_drafter"
    assert set(told["files"]) == files_in(folder) == FILES
    for path in FILES:
        text = (folder / path).read_text()
        assert "{{" not in text
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert all(len(line) <= 100 for line in text.splitlines())
    plugin = (folder / "specreg_my_drafter" / "__init__.py").read_text()
    assert f"DraftingStyle.{kind.upper()}," in plugin
    assert "specreg_my_drafter.speculator:MyDrafterSpeculator" in plugin


def test_the_project_is_named_after_the_method(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("my_drafter") == 0
    project = (tmp_path / "specreg-my-drafter" / "pyproject.toml").read_text()
    assert 'name = "specreg-my-drafter"' in project
    assert 'my_drafter = "specreg_my_drafter"' in project
    shown = capsys.readouterr().out
    assert f"wrote {Path('specreg-my-drafter', 'pyproject.toml')}" in shown
    assert "next: pip install -e 'specreg-my-drafter[test]'" in shown


@pytest.mark.parametrize(
    "name",
    ["", "My_Drafter", "2fast", "a b", "a__b", "a_", "../escape", "a.b", "naïve", "specreg-mine"],
)
def test_a_bad_name_is_refused_with_what_is_allowed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("--", name) == 1
    assert "lower-case words and digits" in capsys.readouterr().err
    assert files_in(tmp_path) == set()


def test_a_method_that_is_served_already_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("draft-model") == 1
    assert "which 'draft_model' of specreg" in capsys.readouterr().err
    assert files_in(tmp_path) == set()


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    assert run("my_drafter", "--directory", str(tmp_path)) == 1
    assert run("my_drafter", "--directory", str(tmp_path / "README.md")) == 1
    assert "there is something already" in capsys.readouterr().err
    assert files_in(tmp_path) == {"README.md"}
    assert (tmp_path / "README.md").read_text() == "mine"


def test_an_empty_directory_is_used(tmp_path):
    assert run("my_drafter", "--directory", str(tmp_path)) == 0
    assert files_in(tmp_path) == FILES


def test_an_unknown_kind_is_wrong_usage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("my_drafter", "--kind", "retrieval") == 2


def test_every_template_is_shipped_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["specreg"]
    package = ROOT / "specreg"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    templates = set((package / "cli" / "templates").iterdir())
    assert templates
    assert templates <= shipped
