"""The example of the page about Gemma 4 assistants, run on a tiny target."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from specreg.cli import main
from specreg.testing.tiny_models import save_tiny_model

PAGE = Path(__file__).parents[2] / "plugins" / "mtp" / "gemma4.md"


def test_the_example_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model("gemma4", tmp_path / "gemma-4")
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    first, second = re.findall(r"^\$ specreg (.*?)(?=^\$|\Z)", block, re.M | re.S)
    generate = [*shlex.split(second.replace("\\\n", " ")), "--max-model-len", "96"]
    for arguments in (shlex.split(first), generate):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert ended.value.code in (0, None), captured.err
    assert "acceptance length" in captured.out


def test_a_target_of_another_kind_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(save_tiny_model("llama", tmp_path / "llama"))
    with pytest.raises(SystemExit) as ended:
        main(["random-drafter", "gemma4", str(tmp_path / "draft"), "--target", target])
    assert ended.value.code not in (0, None)
    assert "an assistant drafts for Gemma 4 only" in capsys.readouterr().err
