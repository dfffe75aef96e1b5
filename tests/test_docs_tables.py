"""Pages that list what the code has: every field and flag is there, and none that is gone."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer

from specreg import capabilities
from specreg.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)
DATA = ("Capabilities", "KVLayerSpec", "TargetNeeds")
ENUMS = [name for name in capabilities.__all__ if name not in DATA]


def sections(page: str) -> dict[str, str]:
    """Text below each heading of the second level, by what the heading has in backquotes."""
    parts = re.split(r"^## `(.+?)`$", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| `")]


def flag_row(parameter: Any) -> str:
    """The line that a parameter of a command must have on the page."""
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.name.upper()]
    shown = ", ".join(f"`{name}`" for name in (*names, *parameter.secondary_opts))
    default = parameter.default
    default = default.value if isinstance(default, Enum) else default
    told = "" if default is None or default is False else f"`{default}`"
    return f"| {shown} | {'required' if parameter.required else told} | {parameter.help} |"


def test_the_page_on_the_command_line_has_a_section_a_command():
    assert sorted(sections("cli.md")) == sorted(f"specreg {name}" for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_page_on_the_command_line_lists_every_flag_with_its_default(name):
    expected = [flag_row(parameter) for parameter in COMMANDS[name].params]
    found = rows(sections("cli.md")[f"specreg {name}"])
    assert found == expected, "the lines should read:\n" + "\n".join(expected)


def default_of(item: Any) -> str:
    if item.default is MISSING:
        return "required"
    value = item.default
    if isinstance(value, frozenset):
        return ", ".join(f"`{member.value}`" for member in value)
    return f"`{value.value if isinstance(value, Enum) else value}`"


@pytest.mark.parametrize("name", DATA)
def test_the_page_on_capabilities_lists_every_field_with_its_default(name):
    declared = [(i.name, default_of(i)) for i in fields(getattr(capabilities, name))]
    told = [line.split(" | ") for line in rows(sections("capabilities.md")[name])]
    assert [(cells[0].strip("| `"), cells[1]) for cells in told] == declared


@pytest.mark.parametrize("name", ENUMS)
def test_the_page_on_capabilities_lists_every_value(name):
    told = re.findall(r"^\| `(\w+)` \|", sections("capabilities.md")[name], flags=re.MULTILINE)
    assert told == [member.value for member in getattr(capabilities, name)]


def test_the_page_on_capabilities_has_no_stale_section():
    assert sorted(sections("capabilities.md")) == sorted(capabilities.__all__)
