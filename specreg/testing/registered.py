"""Looking up an installed speculator by its own name."""

from __future__ import annotations

from specreg.errors import ConfigError
from specreg.registry import Registry
from specreg.specs import SpeculatorSpec
from specreg.spelling import known_names

__all__ = ["registered_spec"]


def registered_spec(name: str, registry: Registry) -> SpeculatorSpec:
    """The spec that `specreg list` prints as `name`. Raises `ConfigError`."""
    found = [entry.spec for entry in registry.speculators if entry.spec.name == name]
    if len(found) == 1:
        return found[0]
    known = {entry.spec.name for entry in registry.speculators}
    broken = "".join(f"; failed to load: {p.source}: {p.error}" for p in registry.broken)
    raise ConfigError(
        f"there is no speculator {name!r}"
        if not found
        else f"several distributions offer a speculator {name!r}",
        where="name of the speculator",
        got=f"{name!r}; {known_names(name, known)}{broken}",
        fix="name one that 'specreg list' prints; SPECREG_PLUGINS leaves distributions out",
    )
