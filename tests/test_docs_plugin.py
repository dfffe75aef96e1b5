"""The page on writing a plugin shows what `specreg new` writes, and its commands run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from editable_projects import install_project

from specreg.cli import main
from specreg.registry import get_registry
from specreg.testing.tiny_models import save_tiny_model

PAGE = (Path(__file__).parents[1] / "docs" / "write-a-plugin.md").read_text()
TINY = ("--max-tokens", "4", "--max-model-len", "64")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)


def commands() -> list[list[str]]:
    """Arguments of each command of specreg on the page, in order."""
    shown = "".join(blocks("console")).replace("\\\n", "")
    lines = [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]
    return [shlex.split(line)[1:] for line in lines if line.startswith("specreg ")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the first command writes, installed."""
    monkeypatch.chdir(tmp_path)
    first, *_ = commands()
    run(*first)
    written = tmp_path / "specreg-my-drafter"
    for path in install_project(written, tmp_path / "site"):
        monkeypatch.syspath_prepend(path)
    get_registry.cache_clear()
    yield written
    get_registry.cache_clear()


def test_the_code_on_the_page_is_what_the_command_writes(project):
    (entry_point,) = blocks("toml")
    plugin, speculator = blocks("python")
    package = project / "specreg_my_drafter"
    assert entry_point in (project / "pyproject.toml").read_text()
    assert plugin == (package / "__init__.py").read_text()
    assert (package / "speculator.py").read_text().endswith(speculator)


def test_the_commands_on_the_page_run(project, tmp_path, capsys):
    """All but the last, which `packages/test_skeleton.py` runs on the same files."""
    target = str(save_tiny_model("llama", tmp_path / "target"))
    told = commands()
    assert [arguments[0] for arguments in told] == ["new", "list", "generate", "check"]
    run(*told[1])
    assert "my_drafter (specreg-my-drafter 0.1.0)" in capsys.readouterr().out
    run(*told[2], "--target", target, *TINY)
    assert "one two one two" in capsys.readouterr().out


def test_the_pages_that_it_points_to_exist():
    docs = Path(__file__).parents[1] / "docs"
    links = re.findall(r"\]\(([\w./-]+)\)", PAGE)
    assert links
    assert all((docs / link).exists() for link in links)
    assert all((docs.parent / path).exists() for path in re.findall(r"`(examples/[\w-]+)`", PAGE))
