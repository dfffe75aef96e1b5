"""The head on the page on drafters with weights keeps what it declares."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from specreg.registry import Registry
from specreg.testing import SpeculatorConformance, Subject, tiny_subject

PAGE = Path(__file__).parents[1] / "docs" / "drafters.md"
GLOO = "ranks: processes over gloo agree with ranks in turn"
OUT_OF_REACH = "rank processes that run already do not see the package of this page"
FILES = ("__init__.py", "speculator.py", "random_drafter.py")


class TestTheHeadOnThePage(SpeculatorConformance):
    tps: ClassVar[tuple[int, ...]] = (1, 2)

    @pytest.fixture
    def subject(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Subject:
        folder = tmp_path_factory.mktemp("page")
        package = folder / "specreg_my_head"
        package.mkdir()
        sources = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
        for name, source in zip(FILES, sources, strict=True):
            (package / name).write_text(source)
        if "specreg_my_head" not in sys.modules:
            sys.path.insert(0, str(folder))  # the class's tests share one subject
        plugin = importlib.import_module("specreg_my_head")
        made = tiny_subject("my_head", folder / "subject", Registry.from_plugins([plugin]))
        return replace(made, plugins=("specreg_my_head",), declared={GLOO: OUT_OF_REACH})
