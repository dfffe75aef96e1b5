"""What the documentation shows is run."""

from __future__ import annotations

import re
import shlex
import types
from pathlib import Path

import pytest

from specreg.cli import main
from specreg.registry import Registry
from specreg.rules import CORE_RULES

DOCS = Path(__file__).parents[1] / "docs"


def snippets(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_plugin_on_the_page_on_hooks_loads():
    (source,) = snippets("hooks.md", "python")
    module = types.ModuleType("documented")
    exec(compile(source, "hooks.md", "exec"), module.__dict__)
    loaded = Registry.from_plugins([module])
    assert loaded.broken == ()
    assert [entry.spec.name for entry in loaded.speculators] == ["acme"]


def test_the_plan_on_the_page_on_the_policy_is_what_the_command_prints(capsys):
    (shown,) = snippets("policy.md", "console")
    command, output = re.fullmatch(r"\$ specreg (.*?\})'\n(.*)", shown, flags=re.DOTALL).groups()
    with pytest.raises(SystemExit, match="0"):
        main(shlex.split(command.replace("\\\n", "") + "'"))
    assert capsys.readouterr().out == output


def test_the_page_on_the_policy_lists_the_rules_in_order():
    page = (DOCS / "policy.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)
    assert listed == [rule.name for rule in CORE_RULES]
