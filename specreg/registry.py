"""What is installed: speculators, policy rules, samplers, watermarkers, and broken plugins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from specreg.config import SpeculativeConfig
from specreg.discovery import (
    BrokenPlugin,
    LoadedPlugin,
    PluginSource,
    choose_sources,
    find_sources,
    load_plugins,
)
from specreg.errors import ConfigError, PluginError
from specreg.selection import Catalogue, RegisteredSpeculator, Selection, select
from specreg.specs import (
    DraftWatermarkerFactory,
    NamedFactory,
    PolicyRule,
    RejectionSamplerFactory,
)
from specreg.spelling import known_names

__all__ = [
    "BrokenPlugin",
    "RegisteredSpeculator",
    "Registry",
    "Selection",
    "get_registry",
    "load",
]

_Factory = TypeVar("_Factory", bound=NamedFactory)


@dataclass(frozen=True)
class Registry:
    """The plugins of a process.

    Attributes:
        plugins: those that loaded.
        broken: those that did not, each with its error.
        left_out: those that the environment keeps from being loaded.
    """

    plugins: tuple[LoadedPlugin, ...]
    broken: tuple[BrokenPlugin, ...] = ()
    left_out: tuple[PluginSource, ...] = ()

    @classmethod
    def from_plugins(cls, plugins: Iterable[object]) -> Registry:
        """A registry of plugin objects that are not installed, each a distribution of its own."""
        sources = []
        for plugin in plugins:
            name = getattr(plugin, "__name__", type(plugin).__name__)
            sources.append(PluginSource(name, name, name, "0", partial(_itself, plugin)))
        loaded, broken = load_plugins(sources)
        return cls(tuple(loaded), tuple(broken))

    @property
    def speculators(self) -> tuple[RegisteredSpeculator, ...]:
        """Every speculator that can be selected, by name."""
        entries = [
            RegisteredSpeculator(spec, plugin.source.distribution, plugin.source.version)
            for plugin in self.plugins
            for spec in plugin.speculators
        ]
        return tuple(sorted(entries, key=lambda entry: (entry.spec.name, entry.distribution)))

    @property
    def policy_rules(self) -> tuple[PolicyRule, ...]:
        """The rules that plugins add, by name."""
        rules = [rule for plugin in self.plugins for rule in plugin.policy_rules]
        return tuple(sorted(rules, key=lambda rule: rule.name))

    def select(
        self,
        speculative: SpeculativeConfig,
        draft_config: Mapping[str, Any] | None = None,
        target_config: Mapping[str, Any] | None = None,
    ) -> Selection:
        """The speculator for a configuration.

        Args:
            speculative: what was asked for.
            draft_config: `config.json` of the draft checkpoint; None when it is unknown. Then the
                least narrowed speculator of the method is taken.
            target_config: that of the target; None when it is unknown.

        Raises:
            UnknownMethodError: nothing serves the method or the checkpoint.
            BrokenPluginError: what would have served it could not be loaded.
            AmbiguousSpeculatorError: two serve it equally specifically.
            ConfigError: a key does not fit the speculator.
        """
        catalogue = Catalogue(self.speculators, self.broken, self.left_out)
        return select(catalogue, speculative, draft_config, target_config)

    def rejection_sampler(self, name: str) -> RejectionSamplerFactory:
        """The rejection sampler registered as `name`. Raises `ConfigError`."""
        found = [(p, item) for p in self.plugins for item in p.rejection_samplers]
        return _named("rejection_sampler", name, found)

    def draft_watermarker(self, name: str) -> DraftWatermarkerFactory:
        """The draft watermarker registered as `name`. Raises `ConfigError`."""
        found = [(p, item) for p in self.plugins for item in p.draft_watermarkers]
        return _named("draft_watermarker", name, found)

    def call_hook(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Call a hook that a plugin added, in every plugin that implements it.

        Args:
            hook: its name.
            arguments: what its specification names.

        Returns:
            Pairs of distribution and result, by distribution.

        Raises:
            PluginError: an implementation raised; it names the distribution.
        """
        results: list[tuple[str, Any]] = []
        for plugin in self.plugins:
            caller = getattr(plugin.manager.hook, hook, None)
            if caller is None:
                continue
            try:
                found = caller(**arguments)
            except Exception as error:
                raise PluginError(
                    f"the hook {hook} failed",
                    where=f"plugin {plugin.source}",
                    got=f"{type(error).__name__}: {error}",
                    fix="repair the plugin, or disable it with SPECREG_DISABLE_PLUGINS",
                ) from error
            results += ((plugin.source.distribution, result) for result in found)
        return results


def _itself(plugin: object) -> object:
    return plugin


def _named(key: str, name: str, registered: Sequence[tuple[LoadedPlugin, _Factory]]) -> _Factory:
    found = [(plugin, item) for plugin, item in registered if item.name == name]
    if len(found) == 1:
        return found[0][1]
    if found:
        raise PluginError(
            f"several plugins register {name!r}",
            where=f"config.{key}",
            got=f"{' and '.join(str(plugin.source) for plugin, _ in found)}; allowed: one",
            fix="leave one of them out with SPECREG_DISABLE_PLUGINS",
        )
    raise ConfigError(
        f"there is no {key.replace('_', ' ')} {name!r}",
        where=f"config.{key}",
        got=f"{name!r}; {known_names(name, (item.name for _, item in registered))}",
        fix="correct the spelling, install its plugin, or remove the key",
    )


def load(environ: Mapping[str, str] | None = None) -> Registry:
    """Find and load every installed plugin that the environment allows.

    Args:
        environ: environment variables; None takes the process's.

    Raises:
        ConfigError: `SPECREG_PLUGINS` names a plugin that is not installed.
    """
    sources, unreadable = find_sources()
    chosen, left_out = choose_sources(sources, os.environ if environ is None else environ)
    loaded, broken = load_plugins(chosen)
    return Registry(tuple(loaded), (*unreadable, *broken), tuple(left_out))


@cache
def get_registry() -> Registry:
    """The registry of this process, loaded when it is first asked for."""
    return load()
