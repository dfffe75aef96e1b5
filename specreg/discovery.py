"""Finding plugins and loading each of them alone, so that a broken one hurts no other."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import pluggy

from specreg.errors import ConfigError, PluginError
from specreg.plugin import ENTRY_POINT_GROUP, Hooks
from specreg.specs import (
    API_VERSION,
    DraftSetup,
    DraftWatermarkerFactory,
    PolicyRule,
    RejectionSamplerFactory,
    SpeculatorSpec,
)
from specreg.spelling import known_names

__all__ = [
    "BrokenPlugin",
    "LoadedPlugin",
    "PluginSource",
    "canonical",
    "choose_sources",
    "find_sources",
    "load_plugins",
]

_Item = TypeVar("_Item")


def canonical(name: str) -> str:
    """A distribution or entry-point name in the one spelling that names are compared in."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class PluginSource:
    """A plugin that may be loaded.

    Attributes:
        name: of its entry point.
        target: what the entry point names, `"module"` or `"module:object"`.
        distribution, version: of the package that it came with.
        load: imports the plugin.
    """

    name: str
    target: str
    distribution: str
    version: str
    load: Callable[[], object] = field(compare=False, repr=False)

    def is_called(self, name: str) -> bool:
        """Whether `name` is that of the entry point or of the distribution."""
        return canonical(name) in (canonical(self.name), canonical(self.distribution))

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be loaded.

    Attributes:
        source: where it came from.
        error: its own error, in one line.
        traceback: the same at length.
        specs: speculators that it offered before it failed; mostly none.
    """

    source: PluginSource
    error: str
    traceback: str
    specs: tuple[SpeculatorSpec, ...] = ()

    def may_serve(self, method: str) -> bool:
        """Whether it is known to serve `method`, or is named like it: more cannot be known."""
        if any(method in spec.methods for spec in self.specs):
            return True
        names = {canonical(self.source.name), canonical(self.source.distribution)}
        names |= {name.removeprefix("specreg-") for name in names}
        return canonical(method) in names


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin whose hooks have been checked and called.

    Attributes:
        source: where it came from.
        manager: pluggy manager that holds this plugin alone.
        speculators, policy_rules, rejection_samplers, draft_watermarkers: what its hooks returned.
    """

    source: PluginSource
    manager: pluggy.PluginManager = field(compare=False, repr=False)
    speculators: tuple[SpeculatorSpec, ...]
    policy_rules: tuple[PolicyRule, ...]
    rejection_samplers: tuple[RejectionSamplerFactory, ...]
    draft_watermarkers: tuple[DraftWatermarkerFactory, ...]


def find_sources() -> tuple[list[PluginSource], list[BrokenPlugin]]:
    """Plugins of every installed distribution, in an order that does not depend on `sys.path`.

    A target that is found more than once is one plugin. A distribution that is found more than once
    counts where Python would import it from. Metadata that cannot be read is a broken plugin.
    """
    sources: list[PluginSource] = []
    broken: list[BrokenPlugin] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        name = version = "unknown"
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if ENTRY_POINT_GROUP not in text:
                continue
            name, version = distribution.metadata["Name"], distribution.version
            if canonical(name) in seen:
                continue
            seen.add(canonical(name))
            sources += (
                PluginSource(entry.name, entry.value, name, version, entry.load)
                for entry in distribution.entry_points.select(group=ENTRY_POINT_GROUP)
            )
        except Exception as error:
            unreadable = PluginSource("unknown", "", name, version, lambda: None)
            broken.append(_broken(unreadable, error))
    by_target: dict[str, PluginSource] = {}
    for source in sorted(sources, key=_order):
        by_target.setdefault(source.target, source)
    return list(by_target.values()), broken


def _order(source: PluginSource) -> tuple[str, str, str]:
    return canonical(source.distribution), source.name, source.target


def choose_sources(
    sources: Iterable[PluginSource], environ: Mapping[str, str]
) -> tuple[list[PluginSource], list[PluginSource]]:
    """Split into those to load and those left out.

    `SPECREG_PLUGINS` lists, separated by commas, the entry points or distributions that may be
    loaded; unset allows all, empty none. `SPECREG_DISABLE_PLUGINS` lists those that may not.

    Raises:
        ConfigError: `SPECREG_PLUGINS` names a plugin that is not installed.
    """
    sources = list(sources)
    allowed, disabled = (_listed(environ, f"SPECREG_{x}PLUGINS") for x in ("", "DISABLE_"))
    for name in allowed or ():
        if not any(source.is_called(name) for source in sources):
            installed = {source.name for source in sources}
            raise ConfigError(
                "a plugin that is asked for is not installed",
                where="environment variable SPECREG_PLUGINS",
                got=f"{name!r}; {known_names(name, installed)}",
                fix="correct the name, install the plugin, or unset the variable",
            )
    chosen: list[PluginSource] = []
    left_out: list[PluginSource] = []
    for source in sources:
        is_allowed = allowed is None or any(map(source.is_called, allowed))
        is_chosen = is_allowed and not any(map(source.is_called, disabled or ()))
        (chosen if is_chosen else left_out).append(source)
    return chosen, left_out


def _listed(environ: Mapping[str, str], variable: str) -> list[str] | None:
    value = environ.get(variable)
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


def load_plugins(
    sources: Iterable[PluginSource],
) -> tuple[list[LoadedPlugin], list[BrokenPlugin]]:
    """Import, check and call every plugin alone; one that fails at any point leaves nothing."""
    broken: list[BrokenPlugin] = []
    plugins: list[tuple[PluginSource, object]] = []
    hookspecs: list[Any] = [Hooks]
    for source in sources:
        outcome = _alone(source, source.load, broken)
        if outcome is not None:
            plugins.append((source, outcome[0]))
    for source, plugin in list(plugins):
        added = _alone(source, partial(_own_hookspecs, source, plugin, hookspecs), broken)
        if added is None:
            plugins.remove((source, plugin))
        else:
            hookspecs += added[0]
    loaded: list[LoadedPlugin] = []
    for source, plugin in plugins:
        specs: list[SpeculatorSpec] = []
        called = _alone(source, partial(_call, source, plugin, hookspecs, specs), broken, specs)
        if called is not None:
            loaded.append(called[0])
    return loaded, broken


def _alone(
    source: PluginSource,
    action: Callable[[], _Item],
    broken: list[BrokenPlugin],
    specs: list[SpeculatorSpec] | None = None,
) -> tuple[_Item] | None:
    """The outcome of `action` in a tuple; None, and a record in `broken`, when it fails."""
    try:
        return (action(),)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may well call sys.exit
        broken.append(_broken(source, error, tuple(specs or ())))
        return None


def _broken(
    source: PluginSource, error: BaseException, specs: tuple[SpeculatorSpec, ...] = ()
) -> BrokenPlugin:
    if isinstance(error, PluginError):
        line = f"{error.what}: {error.where}: {error.got}"
    else:
        line = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return BrokenPlugin(source, line.replace("\n", " "), trace, specs)


def _manager(
    source: PluginSource, plugin: object, hookspecs: Iterable[Any]
) -> pluggy.PluginManager:
    manager = pluggy.PluginManager("specreg")
    for namespace in hookspecs:
        manager.add_hookspecs(namespace)
    manager.register(plugin, source.name)
    return manager


def _own_hookspecs(source: PluginSource, plugin: object, hookspecs: Iterable[Any]) -> list[Any]:
    manager = _manager(source, plugin, hookspecs)
    added: tuple[Any, ...] = _collect(manager, "specreg_hookspecs", object)
    for namespace in added:
        manager.add_hookspecs(namespace)
    return list(added)


def _call(
    source: PluginSource,
    plugin: object,
    hookspecs: Iterable[Any],
    specs: list[SpeculatorSpec],
) -> LoadedPlugin:
    manager = _manager(source, plugin, hookspecs)
    if not manager.get_hookcallers(plugin):
        raise PluginError(
            "the plugin implements no hook",
            where=source.target,
            got="no function marked with specreg.plugin.hookimpl; allowed: at least one",
            fix="mark the hook functions, or correct the entry point",
        )
    specs += _collect(manager, "specreg_speculators", SpeculatorSpec)
    manager.check_pending()
    for spec in specs:
        if spec.api_version > API_VERSION:
            raise PluginError(
                "the plugin was written for a newer plugin interface",
                where=f"SpeculatorSpec {spec.name!r}, api_version",
                got=f"{spec.api_version}; allowed: 1 to {API_VERSION}",
                fix="upgrade specreg, or install an older release of the plugin",
            )
        spec.capabilities_for(DraftSetup())
        spec.needs_for(DraftSetup())
    rejection_samplers = _collect(manager, "specreg_rejection_samplers", RejectionSamplerFactory)
    watermarkers = _collect(manager, "specreg_draft_watermarkers", DraftWatermarkerFactory)
    policy_rules = _collect(manager, "specreg_policy_rules", PolicyRule)
    for items in (specs, rejection_samplers, watermarkers, policy_rules):
        _check_unique([item.name for item in items])
    return LoadedPlugin(
        source,
        manager,
        speculators=tuple(specs),
        policy_rules=policy_rules,
        rejection_samplers=rejection_samplers,
        draft_watermarkers=watermarkers,
    )


def _collect(manager: pluggy.PluginManager, hook: str, kind: type[_Item]) -> tuple[_Item, ...]:
    collected: list[_Item] = []
    caller = getattr(manager.hook, hook)
    results = caller()
    if len(results) < len(caller.get_hookimpls()):
        raise PluginError(
            f"the hook {hook} returned nothing",
            where=hook,
            got=f"None; allowed: an iterable of {kind.__name__}, which may be empty",
            fix="return what the hook offers",
        )
    for result in results:
        items: list[Any] = list(result)
        for item in items:
            if not isinstance(item, kind):
                raise PluginError(
                    f"the hook {hook} returned something else than it promises",
                    where=hook,
                    got=f"{item!r}; allowed: an iterable of {kind.__name__}",
                    fix="correct what the hook returns",
                )
        collected += items
    return tuple(collected)


def _check_unique(names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PluginError(
            "the plugin registers one name twice",
            where="name",
            got=f"{', '.join(repeated)}; allowed: each name once",
            fix="rename one of them",
        )
