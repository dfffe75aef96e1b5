"""The program on the page on requests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "requests.md"


def test_the_program_runs(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    exec(compile(source, "requests.md", "exec"), {"target": str(tiny_target)})
    assert "length" in capsys.readouterr().out
