"""Projects of examples/, installed as their metadata alone, as pip does in editable mode."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fake_distributions import install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["EXAMPLES", "install_project", "projects"]

EXAMPLES = Path(__file__).parents[1] / "examples"


def projects() -> Mapping[str, Path]:
    """Folder of each distribution, by its name."""
    folders = [EXAMPLES / "specreg-example", *(EXAMPLES / "broken-plugins").iterdir()]
    found = [path for path in folders if (path / "pyproject.toml").exists()]
    return {_facts(path)["name"]: path for path in found}


def _facts(project: Path) -> dict[str, Any]:
    facts: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return facts


def install_project(project: Path, folder: Path) -> tuple[str, str]:
    """Install a project as pip does in editable mode; returns what belongs on `sys.path`."""
    facts = _facts(project)
    entry_points = facts["entry-points"]["specreg"]
    version = facts["version"]
    install(folder, facts["name"], entry_points=entry_points, modules={}, version=version)
    return str(folder), str(project)
