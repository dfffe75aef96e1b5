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

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


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


def test_the_python_on_the_readme_runs_from_the_root(monkeypatch, capsys):
    (source,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(ROOT)
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_the_commands_on_the_readme_are_understood(monkeypatch):
    """`generate` is shown by the demo's own test; here it only has to parse."""
    text = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"^```console\n(\$ specreg list.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = re.split(r"^\$ ", shown.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    monkeypatch.chdir(ROOT)
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        if words[0] in ("list", "plan"):
            with pytest.raises(SystemExit, match="0"):
                main(words)
