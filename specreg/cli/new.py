"""`specreg new`: the skeleton of a plugin package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from specreg.capabilities import DraftingStyle
from specreg.errors import ConfigError
from specreg.registry import get_registry

__all__ = ["Kind", "new"]

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_PREFIX = "specreg"


class Kind(str, Enum):
    """Skeletons that there are."""

    AUTOREGRESSIVE = DraftingStyle.AUTOREGRESSIVE.value
    PARALLEL = DraftingStyle.PARALLEL.value


def new(
    name: Annotated[str, typer.Argument(help="The method it will serve, such as my_drafter.")],
    kind: Annotated[
        Kind, typer.Option(help="One token a step, or all in one pass.")
    ] = Kind.AUTOREGRESSIVE,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write; ./specreg-NAME if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a package with a speculator that works as it stands."""
    method = _method_of(name)
    distribution = f"{_PREFIX}-{method.replace('_', '-')}"
    folder = directory or Path(distribution)
    _refuse_to_overwrite(folder)
    package = f"{_PREFIX}_{method}"
    values = {
        "distribution": distribution,
        "package": package,
        "method": method,
        "class": "".join(word.capitalize() for word in method.split("_")) + "Speculator",
        "style": DraftingStyle(kind.value).name,
    }
    files = {
        "README.md": "README.md",
        "pyproject.toml": "pyproject.toml",
        f"{package}/__init__.py": "plugin.py",
        f"{package}/speculator.py": f"{kind.value}.py",
        "tests/test_conformance.py": "test_conformance.py",
    }
    contents = {path: _rendered(template, values) for path, template in files.items()}
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps({"directory": str(folder), "method": method, "files": list(contents)}))
        return
    for path in contents:
        print(f"wrote {folder / path}")
    print(f"next: pip install -e '{folder}[test]' && specreg check {method}")


def _method_of(name: str) -> str:
    """The method of a name, whose words may be joined by dashes too. Raises `ConfigError`."""
    if not _NAME.fullmatch(name) or re.match(rf"{_PREFIX}([_-]|$)", name):
        raise ConfigError(
            "a plugin cannot have this name",
            where="specreg new NAME",
            got=f"{name!r}; allowed: lower-case words and digits that start with a letter, joined "
            f"by '_' or '-', without the prefix {_PREFIX!r}, which is added",
            fix="choose a name such as 'my_drafter'",
        )
    method = name.replace("-", "_")
    for entry in get_registry().speculators:
        if method in (entry.spec.name, *entry.spec.methods):
            raise ConfigError(
                "the method is served already",
                where="specreg new NAME",
                got=f"{name!r}, which {entry} serves; allowed: a name that nothing serves",
                fix="choose another name: two plugins of one method cannot be told apart",
            )
    return method


def _refuse_to_overwrite(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ConfigError(
            "there is something already where the package would be written",
            where=str(folder),
            got="an existing path; allowed: a new or an empty directory",
            fix="remove it, or name another one with --directory",
        )


def _rendered(template: str, values: Mapping[str, str]) -> str:
    source = resources.files("specreg.cli") / "templates" / f"{template}.template"
    text = source.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text
