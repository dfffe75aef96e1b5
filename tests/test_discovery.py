from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys

import pytest
from fake_distributions import PLUGIN, install
from toy_plugins import ToyPlugin, spec

from specreg import registry
from specreg.errors import ConfigError, PluginError
from specreg.plugin import SpeculatorSpec, hookimpl, hookspec
from specreg.registry import Registry


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder for fake distributions on `sys.path`; what is imported from it is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    importlib.invalidate_caches()


def add(site, name, source=PLUGIN, **facts):
    """Install distribution `dist-<name>` with the plugin module `<name>_plugin`."""
    module = f"{name}_plugin"
    install(
        site,
        facts.pop("distribution", f"dist-{name}"),
        entry_points={name: module},
        modules={module: source.replace("{name}", name)},
        **facts,
    )


def names(loaded: Registry) -> list[str]:
    return [entry.spec.name for entry in loaded.speculators if entry.distribution != "specreg"]


BROKEN = {
    "import_error": "import no_such_module",
    "system_exit": "import sys; sys.exit('goodbye')",
    "base_exception": "class Odd(BaseException): pass\nraise Odd('odd')",
    "syntax_error": "def (",
    "raises_late": PLUGIN + "\n@hookimpl\ndef specreg_policy_rules():\n    raise OSError('late')\n",
    "raises_lazily": PLUGIN
    + "\n@hookimpl\ndef specreg_policy_rules():\n    yield 1\n    raise OSError('lazy')\n",
    "signature": PLUGIN.replace("specreg_speculators()", "specreg_speculators(config)"),
    "misspelt_hook": PLUGIN + "\n@hookimpl\ndef specreg_speculator():\n    return []\n",
    "no_hook": "x = 1",
    "no_marker": PLUGIN.replace("@hookimpl\n", ""),
    "wrong_type": PLUGIN.replace("return [", "return ['x'] or ["),
    "not_iterable": PLUGIN.replace("return [", "return 3 or ["),
    "twice": PLUGIN.replace("return [", "return 2 * ["),
    "newer": PLUGIN.replace("needs_checkpoint=False", "api_version=2"),
    "no_facts": PLUGIN.replace("=CAPABILITIES", "=lambda config: config['absent']"),
    "bad_spec": PLUGIN.replace('methods=("{name}",)', 'methods="{name}"'),
    "absent_module": None,
}
ERRORS = {
    "import_error": "No module named 'no_such_module'",
    "system_exit": "SystemExit: goodbye",
    "base_exception": "Odd: odd",
    "syntax_error": "SyntaxError",
    "raises_late": "OSError: late",
    "raises_lazily": "OSError: lazy",
    "signature": "config",
    "misspelt_hook": "unknown hook 'specreg_speculator'",
    "no_hook": "implements no hook",
    "no_marker": "implements no hook",
    "wrong_type": "an iterable of SpeculatorSpec",
    "not_iterable": "TypeError",
    "twice": "registers one name twice",
    "newer": "2; allowed: 1 to 1",
    "no_facts": "cannot tell its capabilities",
    "bad_spec": "a tuple of non-empty strings",
    "absent_module": "No module named 'absent_module_plugin'",
}


def add_broken(site, name):
    source = BROKEN[name]
    if source is None:
        install(site, f"dist-{name}", entry_points={name: f"{name}_plugin"}, modules={})
    else:
        # Some replacements come after the format fields of the template.
        add(site, name, source)


def test_broken_plugins_of_every_kind_leave_the_good_ones_alone(site):
    add(site, "good1")
    for name in BROKEN:
        add_broken(site, name)
    add(site, "zgood2")
    loaded = registry.load({})
    assert names(loaded) == ["good1", "zgood2"]
    found = {plugin.source.name: plugin for plugin in loaded.broken}
    assert sorted(found) == sorted(BROKEN)
    for name, plugin in found.items():
        assert ERRORS[name] in plugin.error, name
        assert "\n" not in plugin.error
        assert plugin.traceback.startswith("Traceback") or "Error" in plugin.traceback
        assert (plugin.source.distribution, plugin.source.version) == (f"dist-{name}", "1.0")


def test_a_plugin_that_fails_late_leaves_nothing_of_itself(site):
    add_broken(site, "raises_late")
    loaded = registry.load({})
    assert names(loaded) == []
    assert loaded.policy_rules == ()


def test_interrupting_the_user_interrupts_loading(site):
    add(site, "stopped", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry.load({})


def test_the_result_does_not_depend_on_the_order_of_the_path(site, tmp_path, monkeypatch):
    folders = {name: tmp_path / f"folder_{name}" for name in ("a", "b", "c")}
    for name, folder in folders.items():
        add(folder, name)
    outcomes = set()
    original = list(sys.path)
    for order in itertools.permutations(folders):
        monkeypatch.setattr(sys, "path", [*(str(folders[name]) for name in order), *original])
        importlib.invalidate_caches()
        loaded = registry.load({})
        outcomes.add(tuple((entry.spec.name, entry.distribution) for entry in loaded.speculators))
    assert len(outcomes) == 1


def test_one_distribution_found_twice_is_one_plugin(site, tmp_path, monkeypatch):
    add(site, "twin")
    add(tmp_path / "other", "twin")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    loaded = registry.load({})
    assert names(loaded) == ["twin"]
    assert loaded.broken == ()


def test_one_target_named_by_two_distributions_is_one_plugin(site):
    add(site, "twin")
    install(site, "a-copy", entry_points={"twin": "twin_plugin"}, modules={})
    loaded = registry.load({})
    assert [e.distribution for e in loaded.speculators if e.spec.name == "twin"] == ["a-copy"]


def test_one_name_with_two_targets_loads_both_for_selection_to_refuse(site):
    add(site, "acme")
    install(
        site,
        "rival",
        entry_points={"acme": "rival_plugin"},
        modules={"rival_plugin": PLUGIN.replace("{name}", "acme")},
    )
    loaded = registry.load({})
    assert [e.distribution for e in loaded.speculators if e.spec.name == "acme"] == [
        "dist-acme",
        "rival",
    ]


def test_metadata_that_cannot_be_read_is_a_broken_plugin(site):
    add(site, "good")
    info = site / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specreg]\nno equals sign\n")
    loaded = registry.load({})
    assert names(loaded) == ["good"]
    assert [plugin.source.distribution for plugin in loaded.broken] == ["odd"]


def test_the_built_in_plugins_are_found_through_entry_points():
    assert any(entry.distribution == "specreg" for entry in registry.load({}).speculators)


@pytest.mark.parametrize("name", ["two", "dist-two", "DIST_two"])
def test_the_allow_list_names_entry_points_or_distributions(site, name):
    for plugin in ("one", "two", "three"):
        add(site, plugin)
    loaded = registry.load({"SPECREG_PLUGINS": f" {name} ,"})
    assert [entry.spec.name for entry in loaded.speculators] == ["two"]
    assert {"one", "three"} <= {source.name for source in loaded.left_out}


def test_the_deny_list_wins_over_the_allow_list(site):
    for plugin in ("one", "two"):
        add(site, plugin)
    environ = {"SPECREG_PLUGINS": "one,two", "SPECREG_DISABLE_PLUGINS": "dist-one,not-there"}
    assert names(registry.load(environ)) == ["two"]


def test_a_plugin_that_is_left_out_is_not_imported(site):
    add_broken(site, "system_exit")
    assert registry.load({"SPECREG_DISABLE_PLUGINS": "system_exit"}).broken == ()


def test_an_empty_allow_list_allows_nothing(site):
    add(site, "one")
    assert registry.load({"SPECREG_PLUGINS": ""}).speculators == ()


def test_an_allowed_plugin_that_is_not_installed_is_an_error(site):
    add(site, "lookup")
    with pytest.raises(ConfigError, match=r"'lokup'; did you mean 'lookup'"):
        registry.load({"SPECREG_PLUGINS": "lokup"})


def test_child_processes_see_the_same_plugins(site):
    add(site, "child")
    source = "from specreg.registry import load; print([e.spec.name for e in load().speculators])"
    environ = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", source]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str([entry.spec.name for entry in registry.load({}).speculators])


class MarkovHooks:
    """Hooks that a plugin adds."""

    @hookspec
    def specreg_toy_samplers(self, draft_config):
        """Samplers of the toy plugin."""


class Owner(ToyPlugin):
    @hookimpl
    def specreg_hookspecs(self):
        return [MarkovHooks]


class Implementer:
    __name__ = "implementer"

    @hookimpl(optionalhook=True)
    def specreg_toy_samplers(self, draft_config):
        return f"sampler of {draft_config}"


class WrongImplementer:
    __name__ = "wrong-implementer"

    @hookimpl(optionalhook=True)
    def specreg_toy_samplers(self, weights):
        return weights


class Raising:
    __name__ = "raising"

    @hookimpl(optionalhook=True)
    def specreg_toy_samplers(self, draft_config):
        raise OSError("no device")


@pytest.mark.parametrize("order", [0, 1])
def test_a_plugin_adds_hooks_that_others_implement_in_any_order(order):
    plugins = [Owner(spec(), name="owner"), Implementer()]
    loaded = Registry.from_plugins(plugins if order else plugins[::-1])
    assert loaded.broken == ()
    assert loaded.call_hook("specreg_toy_samplers", draft_config="x") == [
        ("implementer", "sampler of x")
    ]


def test_an_implementation_of_an_added_hook_is_checked_against_it():
    loaded = Registry.from_plugins([Owner(spec(), name="owner"), WrongImplementer()])
    assert [plugin.source.name for plugin in loaded.broken] == ["wrong-implementer"]


def test_an_optional_hook_whose_owner_is_absent_does_no_harm():
    loaded = Registry.from_plugins([Implementer()])
    assert loaded.broken == ()
    assert loaded.call_hook("specreg_no_such_hook") == []


def test_an_added_hook_that_fails_names_the_plugin():
    loaded = Registry.from_plugins([Owner(spec(), name="owner"), Raising()])
    with pytest.raises(
        PluginError, match=r"specreg_toy_samplers failed[\s\S]*raising[\s\S]*no device"
    ):
        loaded.call_hook("specreg_toy_samplers", draft_config={})


def test_hooks_that_are_none_make_the_plugin_a_broken_one():
    class NoHooks(ToyPlugin):
        @hookimpl
        def specreg_hookspecs(self):
            return [SpeculatorSpec]

    loaded = Registry.from_plugins([NoHooks(spec(), name="no-hooks"), ToyPlugin(spec("good"))])
    assert [plugin.source.name for plugin in loaded.broken] == ["no-hooks"]
    assert [entry.spec.name for entry in loaded.speculators] == ["good"]
