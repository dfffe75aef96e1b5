from __future__ import annotations

import inspect
import re
from pathlib import Path

import pluggy
import pytest

from specreg import plugin
from specreg.plugin import ENTRY_POINT_GROUP, Hooks, hookimpl

DOCS = Path(__file__).parents[1] / "docs"
TEMPLATE = ["When", "How often", "Parameters", "Returns", "Errors", "Do not"]
HOOKS = {name: hook for name, hook in vars(Hooks).items() if name.startswith("specreg_")}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_documented_after_the_one_template(name):
    docstring = inspect.getdoc(HOOKS[name])
    summary, blank, *rest = docstring.splitlines()
    assert summary.endswith(".")
    assert blank == ""
    headings = [re.match(r"([A-Z][a-z ]+):", line) for line in rest if not line.startswith(" ")]
    assert [heading and heading[1] for heading in headings] == TEMPLATE


def test_every_hook_is_a_specification_of_the_project():
    manager = pluggy.PluginManager(ENTRY_POINT_GROUP)
    manager.add_hookspecs(Hooks)
    assert sorted(HOOKS) == sorted(name for name in vars(manager.hook) if name[0] != "_")


def test_the_page_on_hooks_lists_every_hook():
    page = (DOCS / "hooks.md").read_text()
    assert sorted(re.findall(r"^## `(\w+)`", page, flags=re.MULTILINE)) == sorted(HOOKS)


def test_an_implementation_is_marked_and_stays_a_plain_function():
    @hookimpl
    def specreg_speculators():
        return [1]

    assert specreg_speculators() == [1]


def test_everything_that_a_plugin_author_needs_is_in_one_module():
    assert {"SpeculatorSpec", "PolicyRule", "hookimpl", "hookspec"} <= set(plugin.__all__)
