"""The examples in the plugins' own pages, run on a tiny model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from specreg.cli import main
from specreg.testing.tiny_models import save_tiny_model

PLUGINS = Path(__file__).parents[2] / "plugins"
PAGES = sorted(PLUGINS.glob("*/README.md"))


def examples(page: Path) -> list[list[str]]:
    """Arguments of the commands of the page's one example."""
    (shown,) = re.findall(r"^```console\n\$ specreg (.*?)^```$", page.read_text(), re.M | re.S)
    commands = re.split(r"^\$ specreg ", shown.replace("\\\n", " "), flags=re.M)
    return [shlex.split(command) for command in commands]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_example_runs(
    page: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECREG_WATERMARK_KEY", "keep me")
    monkeypatch.chdir(tmp_path)
    model = str(save_tiny_model("llama", tmp_path))
    for arguments in examples(page):
        arguments = [a.replace("smollm2-135m-instruct", model) for a in arguments]
        if arguments[0] == "generate":
            arguments += ["--target", model, "--max-model-len", "128"]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert ended.value.code in (0, None), captured.err
    assert "acceptance length" in captured.out


def test_every_plugin_of_the_core_has_a_page() -> None:
    folders = {path.parents[1].name for path in PLUGINS.glob("*/specreg_*/__init__.py")}
    assert folders == {page.parent.name for page in PAGES}
