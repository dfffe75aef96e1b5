"""Choosing the speculator of a run among those registered, by specificity and never by order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from specreg.capabilities import Capabilities, DraftingStyle
from specreg.config import SpeculativeConfig, config_error
from specreg.discovery import BrokenPlugin, PluginSource, canonical
from specreg.errors import (
    AmbiguousSpeculatorError,
    BrokenPluginError,
    CheckpointError,
    ConfigError,
    PluginError,
    UnknownMethodError,
)
from specreg.specs import DraftSetup, SpeculatorSpec
from specreg.speculative_keys import SPECULATIVE_KEYS
from specreg.spelling import known_names

__all__ = ["Catalogue", "RegisteredSpeculator", "Selection", "select"]

DraftConfig = Mapping[str, Any]


class RegisteredSpeculator(NamedTuple):
    """A speculator and where it came from."""

    spec: SpeculatorSpec
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.spec.name!r} of {self.distribution} {self.version}"


@dataclass(frozen=True)
class Selection:
    """The speculator of a run.

    Attributes:
        spec: what was selected.
        distribution, version: where it came from.
        setup: what its declarations depend on.
        speculative: the configuration with `method` and `num_speculative_tokens` filled in.
    """

    spec: SpeculatorSpec
    distribution: str
    version: str
    setup: DraftSetup
    speculative: SpeculativeConfig

    @property
    def capabilities(self) -> Capabilities:
        """What the speculator declares for this setup."""
        return self.spec.capabilities_for(self.setup)


@dataclass(frozen=True)
class Catalogue:
    """What there is to select from.

    Attributes:
        speculators: those that loaded.
        broken: plugins that did not.
        left_out: plugins that the environment keeps from being loaded.
    """

    speculators: tuple[RegisteredSpeculator, ...]
    broken: tuple[BrokenPlugin, ...]
    left_out: tuple[PluginSource, ...]


def select(
    catalogue: Catalogue,
    speculative: SpeculativeConfig,
    draft_config: DraftConfig | None,
    target_config: DraftConfig | None = None,
) -> Selection:
    """The most specific speculator for a configuration and its checkpoints' (None: unknown)."""
    catalogue = _pinned(catalogue, speculative.plugin)
    method = speculative.method or _named_method(catalogue, draft_config)
    if method is None:
        serving = list(catalogue.speculators)
    else:
        serving = [entry for entry in catalogue.speculators if method in entry.spec.methods]
        if not serving:
            raise _unknown_method(catalogue, method)
        if speculative.model is None and any(e.spec.may_lie_in_target for e in serving):
            draft_config = target_config
    if draft_config is None:
        if method is None:
            raise _undetected(catalogue, speculative, draft_config)
        chosen = _one(_extreme(serving, min), method, is_config_known=False)
    else:
        fits = _detects if method is None else _matches
        matching = [entry for entry in serving if fits(entry.spec, draft_config)]
        best = _extreme(matching, max)
        _refuse_if_broken_is_better(catalogue, method, draft_config, best)
        if not best:
            if method is None:
                raise _undetected(catalogue, speculative, draft_config)
            raise _unserved_checkpoint(serving, method, draft_config)
        chosen = _one(best, method, is_config_known=True)
    return _completed(chosen, method, speculative, draft_config or {}, target_config or {})


def _pinned(catalogue: Catalogue, plugin: str | None) -> Catalogue:
    if plugin is None:
        return catalogue
    pin = canonical(plugin)
    speculators = tuple(e for e in catalogue.speculators if canonical(e.distribution) == pin)
    broken = tuple(b for b in catalogue.broken if canonical(b.source.distribution) == pin)
    if not speculators and broken:
        raise _broken_error(broken[0], f"the pinned distribution {plugin!r}")
    if not speculators:
        installed = {entry.distribution for entry in catalogue.speculators}
        left_out = [str(s) for s in catalogue.left_out if canonical(s.distribution) == pin]
        note = f"; left out by the environment: {', '.join(left_out)}" if left_out else ""
        raise ConfigError(
            "the pinned distribution offers no speculator",
            where="speculative_config.plugin",
            got=f"{plugin!r}; {known_names(plugin, installed)}{note}",
            fix="correct the name, install the distribution, or remove the key",
        )
    return Catalogue(speculators, broken, ())


def _named_method(catalogue: Catalogue, draft_config: DraftConfig | None) -> str | None:
    """The algorithm of a `speculators` config, when some speculator serves it by that name."""
    part = (draft_config or {}).get("speculators_config")
    algorithm = part.get("algorithm") if isinstance(part, Mapping) else None
    served = {method for entry in catalogue.speculators for method in entry.spec.methods}
    return algorithm if isinstance(algorithm, str) and algorithm in served else None


def _narrowing(spec: SpeculatorSpec) -> tuple[bool, bool]:
    """How specific a spec is; compares like (method) < (predicate) < (architecture) < (both)."""
    return bool(spec.architectures or spec.model_types), spec.predicate is not None


def _extreme(entries: Sequence[RegisteredSpeculator], which: Any) -> list[RegisteredSpeculator]:
    if not entries:
        return []
    level = which(_narrowing(entry.spec) for entry in entries)
    return [entry for entry in entries if _narrowing(entry.spec) == level]


def _identity(draft_config: DraftConfig) -> tuple[set[str], set[str]]:
    """Architectures and model types that a draft config names."""
    architectures = draft_config.get("architectures")
    if not isinstance(architectures, list | tuple):
        architectures = [architectures]
    types = [draft_config.get("model_type"), draft_config.get("speculators_model_type")]
    return (
        {name for name in architectures if isinstance(name, str)},
        {name for name in types if isinstance(name, str)},
    )


def _matches(spec: SpeculatorSpec, draft_config: DraftConfig) -> bool:
    architectures, model_types = _identity(draft_config)
    if _narrowing(spec)[0] and not (
        architectures.intersection(spec.architectures) or model_types.intersection(spec.model_types)
    ):
        return False
    return spec.predicate is None or bool(_ask(spec, "predicate", draft_config))


def _detects(spec: SpeculatorSpec, draft_config: DraftConfig) -> bool:
    """Whether a spec claims a draft config that comes without a method."""
    if any(_narrowing(spec)) and _matches(spec, draft_config):
        return True
    return spec.detects is not None and bool(_ask(spec, "detects", draft_config))


def _ask(spec: SpeculatorSpec, field: str, draft_config: DraftConfig) -> Any:
    """What a spec's function of the draft config answers."""
    try:
        return getattr(spec, field)(draft_config)
    except CheckpointError:  # The draft config is at fault, not the plugin.
        raise
    except Exception as error:
        raise PluginError(
            f"{field} of speculator {spec.name!r} failed",
            where=f"SpeculatorSpec {spec.name!r}, {field}(draft_config)",
            got=f"{type(error).__name__}: {error}; allowed: an answer for every config.json",
            fix="set 'method' to another one, or disable the plugin with SPECREG_DISABLE_PLUGINS",
        ) from error


def _one(
    entries: list[RegisteredSpeculator], method: str | None, *, is_config_known: bool
) -> RegisteredSpeculator:
    if len(entries) == 1:
        return entries[0]
    names = " and ".join(str(entry) for entry in entries)
    if len({canonical(entry.distribution) for entry in entries}) > 1:
        fix = f'pin one of them, like "plugin": "{entries[0].distribution}"'
    elif is_config_known:
        fix = "report it to the plugin's authors: one of the two must be narrowed further"
    else:
        fix = "name a draft checkpoint that is there: its config.json decides between them"
    raise AmbiguousSpeculatorError(
        f"several speculators serve {_asked(method)} equally specifically",
        where="speculative_config.method",
        got=f"{names}; allowed: one",
        fix=fix,
    )


def _asked(method: str | None) -> str:
    return "this draft checkpoint" if method is None else f"method {method!r}"


def _refuse_if_broken_is_better(
    catalogue: Catalogue,
    method: str | None,
    draft_config: DraftConfig,
    best: list[RegisteredSpeculator],
) -> None:
    """A broken plugin that would have been selected is named; nothing else takes its place."""
    level = _narrowing(best[0].spec) if best else None

    def would_win(spec: SpeculatorSpec) -> bool:
        is_asked = method is None or method in spec.methods
        is_better = level is None or _narrowing(spec) > level
        fits = _detects if method is None else _matches
        with suppress(PluginError):  # A predicate that fails too is no reason to stop the run.
            return is_asked and is_better and fits(spec, draft_config)
        return False

    for plugin in catalogue.broken:
        may_have_won = level is None and method is not None and plugin.may_serve(method)
        if may_have_won or any(map(would_win, plugin.specs)):
            raise _broken_error(plugin, f"the plugin that serves {_asked(method)}")


def _broken_error(plugin: BrokenPlugin, what: str) -> BrokenPluginError:
    return BrokenPluginError(
        f"{what} could not be loaded",
        where=f"plugin {plugin.source}, entry point {plugin.source.target!r}",
        got=plugin.error,
        fix="repair or reinstall it ('specreg list' shows every broken plugin), or choose another "
        "method",
    )


def _unknown_method(catalogue: Catalogue, method: str) -> Exception:
    for plugin in catalogue.broken:
        if plugin.may_serve(method):
            return _broken_error(plugin, f"the plugin that serves method {method!r}")
    known = {name for entry in catalogue.speculators for name in entry.spec.methods}
    return UnknownMethodError(
        f"no installed speculator serves method {method!r}",
        where="speculative_config.method",
        got=f"{method!r}; {known_names(method, known)}{_others(catalogue)}",
        fix="correct the spelling, or install a plugin that serves it",
    )


def _others(catalogue: Catalogue) -> str:
    """What else might have served the request: broken plugins and those left out."""
    notes = [f"failed to load: {plugin.source}: {plugin.error}" for plugin in catalogue.broken]
    notes += [f"left out by the environment: {source}" for source in catalogue.left_out]
    return "".join(f"; {note}" for note in notes)


def _unserved_checkpoint(
    serving: list[RegisteredSpeculator], method: str, draft_config: DraftConfig
) -> UnknownMethodError:
    architectures, model_types = _identity(draft_config)
    allowed = {name for e in serving for name in (*e.spec.architectures, *e.spec.model_types)}
    return UnknownMethodError(
        f"no installed speculator serves method {method!r} for this draft checkpoint",
        where="architectures and model_type of the draft config.json",
        got=f"{sorted(architectures)}, {sorted(model_types)}; allowed: {sorted(allowed)}, or what "
        f"a predicate of {', '.join(str(entry) for entry in serving)} accepts",
        fix="choose the method that the checkpoint was trained for, or install its plugin",
    )


def _undetected(
    catalogue: Catalogue, speculative: SpeculativeConfig, draft_config: DraftConfig | None
) -> UnknownMethodError:
    if draft_config is None:
        found = f"no config.json for model {speculative.model!r}"
    else:
        found = f"a config of {sorted(set().union(*_identity(draft_config)))}"
    known = sorted({name for entry in catalogue.speculators for name in entry.spec.methods})
    return UnknownMethodError(
        "the method cannot be detected from the draft checkpoint",
        where="speculative_config.method",
        got=f"{found}; known methods: {', '.join(known) or 'none'}{_others(catalogue)}",
        fix="set 'method'",
    )


def _completed(
    entry: RegisteredSpeculator,
    method: str | None,
    speculative: SpeculativeConfig,
    draft_config: DraftConfig,
    target_config: DraftConfig,
) -> Selection:
    spec = entry.spec
    if spec.needs_checkpoint and speculative.model is None and not spec.may_lie_in_target:
        raise ConfigError(
            f"speculator {spec.name!r} needs a draft checkpoint",
            where="speculative_config.model",
            got="null; allowed: a directory or a known name",
            fix="set 'model'",
        )
    k = speculative.num_speculative_tokens or _num_speculative_tokens(spec, draft_config)
    if k is None:
        raise ConfigError(
            "the number of draft tokens is not known",
            where="speculative_config.num_speculative_tokens",
            got="null, and the draft config does not say; allowed: a positive number",
            fix="set 'num_speculative_tokens'",
        )
    setup = DraftSetup(draft_config, target_config, k, _options(spec, speculative.options))
    capabilities = spec.capabilities_for(setup)
    most = capabilities.max_num_speculative_tokens
    if most is not None and k > most:
        raise ConfigError(
            f"speculator {spec.name!r} cannot draft so many tokens with this checkpoint",
            where="speculative_config.num_speculative_tokens",
            got=f"{k}; allowed: 1 to {most}",
            fix="lower it",
        )
    style = capabilities.style
    is_parallel = style is not DraftingStyle.AUTOREGRESSIVE
    if speculative.parallel_drafting not in (None, is_parallel):
        raise ConfigError(
            f"speculator {spec.name!r} drafts in one way only",
            where="speculative_config.parallel_drafting",
            got=f"{speculative.parallel_drafting}; allowed: null or {is_parallel}, as it is "
            f"{style.value}",
            fix="remove the key, or choose another method",
        )
    completed = speculative.model_dump(exclude_none=True)
    completed |= {"method": method or spec.methods[0], "num_speculative_tokens": k}
    return Selection(
        spec=spec,
        distribution=entry.distribution,
        version=entry.version,
        setup=setup,
        speculative=SpeculativeConfig.parse(completed),
    )


def _num_speculative_tokens(spec: SpeculatorSpec, draft_config: DraftConfig) -> int | None:
    part = draft_config.get("speculators_config")
    proposals = part.get("proposal_methods") if isinstance(part, Mapping) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    stated = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    has_default = spec.default_num_speculative_tokens is not None and draft_config
    default = _ask(spec, "default_num_speculative_tokens", draft_config) if has_default else None
    for value in (stated, draft_config.get("n_predict"), default):
        if type(value) is int and value > 0:
            return value
    return None


def _options(spec: SpeculatorSpec, options: Mapping[str, Any]) -> BaseModel | None:
    model = spec.options_model
    declared: set[str] = set()
    if model is not None:
        aliases = {f.alias for f in model.model_fields.values() if f.alias is not None}
        declared = set(model.model_fields) | aliases
    for key in sorted(set(options) - declared):
        known = declared | set(SpeculativeConfig.model_fields) | set(SPECULATIVE_KEYS)
        what = f"speculator {spec.name!r} has no option {key!r}"
        if key in SPECULATIVE_KEYS:
            what += ": the key belongs to another speculator"
        raise ConfigError(
            what,
            where=f"speculative_config.{key}",
            got=f"{key!r}; {known_names(key, known - {key})}",
            fix="correct the spelling or remove the key",
        )
    if model is None:
        return None
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise config_error(error, "speculative_config") from None
