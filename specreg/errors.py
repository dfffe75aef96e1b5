"""The error tree. Every message has four parts: what failed, where, what was got, what to do."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AdmissionError",
    "AmbiguousSpeculatorError",
    "BrokenPluginError",
    "CheckpointError",
    "ConfigError",
    "DownloadError",
    "InternalError",
    "MissingDependencyError",
    "PluginError",
    "PolicyError",
    "RankDivergenceError",
    "RankFailedError",
    "SpecregError",
    "TargetError",
    "TensorError",
    "UnknownMethodError",
]


class SpecregError(Exception):
    """Base of every error that specreg raises on purpose.

    Args:
        what: what failed, as a clause without a full stop.
        where: the plugin, config field, file or tensor concerned.
        got: what was found, set against what is allowed.
        fix: what the reader can do about it.
    """

    code: ClassVar[str] = "specreg"

    def __init__(self, what: str, *, where: str, got: str, fix: str) -> None:
        self.what, self.where, self.got, self.fix = what, where, got, fix
        super().__init__(what)

    def __str__(self) -> str:
        return (
            f"[{self.code}] {self.what}\n  where: {self.where}\n  got:   {self.got}\n"
            f"  fix:   {self.fix}"
        )


class ConfigError(SpecregError):
    """A configuration key or value that specreg cannot honour."""

    code = "config"


class UnknownMethodError(ConfigError):
    """No installed speculator serves the requested method."""

    code = "unknown-method"


class PluginError(SpecregError):
    """A plugin breaks the contract of `specreg.plugin`."""

    code = "plugin"


class BrokenPluginError(PluginError):
    """The plugin that would serve the request failed while it was loaded."""

    code = "broken-plugin"


class AmbiguousSpeculatorError(PluginError):
    """Two installed speculators serve the request equally specifically."""

    code = "ambiguous-speculator"


class PolicyError(SpecregError):
    """A required plan is not possible."""

    code = "policy"


class CheckpointError(SpecregError):
    """A checkpoint's files, config or tensors do not fit the model that reads them."""

    code = "checkpoint"


class TargetError(SpecregError):
    """The embedded runtime cannot run this target model."""

    code = "target"


class TensorError(SpecregError):
    """A tensor handed to an op has a shape, dtype, device or value that the op refuses."""

    code = "tensor"


class AdmissionError(SpecregError):
    """A request cannot be admitted as it stands."""

    code = "admission"


class RankDivergenceError(SpecregError):
    """Replicated ranks proposed different draft tokens."""

    code = "rank-divergence"


class RankFailedError(SpecregError):
    """A rank of the tensor-parallel group died or raised."""

    code = "rank-failed"


class MissingDependencyError(SpecregError):
    """An optional dependency is needed and is not installed."""

    code = "missing-dependency"


class DownloadError(SpecregError):
    """The embedded default model could not be fetched or failed its checksum."""

    code = "download"


class InternalError(SpecregError):
    """A state that specreg's own code should have made impossible."""

    code = "internal"
