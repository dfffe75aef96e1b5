"""What a conformance run is about: a speculator, set up with a tiny target."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specreg.errors import ConfigError, PluginError
from specreg.model_config import read_model_config
from specreg.registry import Registry, get_registry
from specreg.specs import NamedFactory
from specreg.testing.registered import registered_spec

__all__ = ["Subject", "tiny_subject"]

NUM_SPECULATIVE_TOKENS = 3


@dataclass(frozen=True)
class Subject:
    """A speculator to prove, in a form that other processes can be sent.

    Attributes:
        speculative: the speculative config that selects it; K of 3 or so, a tiny checkpoint.
        target: directory of a tiny target; a few dozen tokens of vocabulary give the distribution
            tests their power.
        declared: check name -> why it cannot be proven here. Without an entry, a case that cannot
            run fails.
        plugins: import strings `"module"` or `"module:object"` of plugins; then these are the whole
            registry, installed or not.
        optional_tensors: checkpoint tensors that may be missing, such as a head that is shared.
        device: where it runs; ranks that take turns share it.
        dtype: of weights and states; `"auto"` is the target checkpoint's own, fp32.
    """

    speculative: Mapping[str, Any]
    target: str
    declared: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    optional_tensors: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "auto"

    def registry(self) -> Registry:
        """Where the speculator is found.

        Raises:
            PluginError: a plugin cannot be imported, or breaks the contract of plugins.
        """
        if not self.plugins:
            return get_registry()
        registry = Registry.from_plugins([_imported(path) for path in self.plugins])
        for plugin in registry.broken:
            raise PluginError(
                "a plugin of the subject could not be loaded",
                where=f"Subject.plugins, {plugin.source}",
                got=plugin.error,
                fix="repair the plugin",
            )
        return registry


def tiny_subject(name: str, directory: Path, registry: Registry | None = None) -> Subject:
    """The subject of an installed speculator.

    Args:
        name: of the speculator, as `specreg list` prints it.
        directory: an empty one, for the checkpoints.
        registry: where to look; None is what is installed.

    Raises:
        ConfigError: no such speculator, or one whose checkpoint nobody can make.
        PluginError: its `tiny_subject` cannot be imported.
    """
    spec = registered_spec(name, registry or get_registry())
    if spec.tiny_subject is not None:
        make = NamedFactory(spec.name, spec.tiny_subject).load_factory()
        subject = make(directory)
        if not isinstance(subject, Subject):
            raise PluginError(
                "a tiny subject is none",
                where=f"SpeculatorSpec {spec.name!r}, tiny_subject {spec.tiny_subject!r}",
                got=f"{type(subject).__name__}; allowed: specreg.testing.Subject",
                fix="return Subject(speculative=..., target=...)",
            )
        return subject
    if spec.needs_checkpoint and spec.random_drafter is None:
        raise ConfigError(
            f"speculator {name!r} cannot be checked without a checkpoint",
            where=f"SpeculatorSpec {name!r}, random_drafter and tiny_subject",
            got="None, although needs_checkpoint is True; allowed: an import string",
            fix="let the plugin name a function that writes a random drafter",
        )
    from specreg.testing.random_drafter import make_random_drafter
    from specreg.testing.tiny_subjects import save_kit_target

    target = save_kit_target(directory / "target")
    speculative: dict[str, Any] = {
        "method": spec.methods[0],
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }
    if spec.random_drafter is not None:
        config = read_model_config(str(target)) or {}
        speculative |= make_random_drafter(spec, directory / "draft", config)
    return Subject(speculative, str(target))


def _imported(path: str) -> object:
    module, _, attribute = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
