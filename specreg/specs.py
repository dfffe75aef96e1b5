"""What a plugin registers: frozen data that names code by import string and imports none of it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from specreg.capabilities import Capabilities, DraftLogitsLayout, TargetNeeds
from specreg.errors import CheckpointError, ConfigError, PluginError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from specreg.config import EngineConfig

__all__ = [
    "API_VERSION",
    "DraftSetup",
    "DraftWatermarkerFactory",
    "LoadedParts",
    "NamedFactory",
    "PolicyInputs",
    "PolicyRule",
    "RejectionSamplerFactory",
    "SpeculatorSpec",
    "Verdict",
]

API_VERSION = 1
"""Newest plugin interface that this specreg speaks."""

DraftConfig = Mapping[str, Any]
_Fact = TypeVar("_Fact")
_NO_NEEDS = TargetNeeds()

_IMPORT_STRING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _require(holds: bool, owner: str, field: str, got: object, allowed: str) -> None:
    if not holds:
        raise PluginError(
            f"{owner} is not declared correctly",
            where=field,
            got=f"{got!r}; allowed: {allowed}",
            fix="correct the declaration in the plugin",
        )


def _require_names(owner: str, field: str, value: object, *, may_be_empty: bool) -> None:
    is_names = isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
    _require(is_names, owner, field, value, "a tuple of non-empty strings")
    _require(may_be_empty or bool(value), owner, field, value, "at least one name")


@dataclass(frozen=True)
class NamedFactory:
    """Code that a configuration can select by name, imported when it is first needed.

    Attributes:
        name: the name to select it by.
        factory: import string `"module:callable"`.
    """

    name: str
    factory: str

    def __post_init__(self) -> None:
        kind = type(self).__name__
        _require(isinstance(self.name, str) and self.name != "", kind, "name", self.name, "a name")
        is_import_string = isinstance(self.factory, str) and bool(
            _IMPORT_STRING.fullmatch(self.factory)
        )
        _require(
            is_import_string,
            f"{kind} {self.name!r}",
            "factory",
            self.factory,
            "an import string 'module:callable'",
        )

    def load_factory(self) -> Callable[..., Any]:
        """Import the factory. Raises `PluginError` with the cause when that fails."""
        module, _, path = self.factory.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for attribute in path.split("."):
                found = getattr(found, attribute)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"the factory of {self.name!r} cannot be imported",
                where=f"{type(self).__name__} {self.name!r}, factory {self.factory!r}",
                got=f"{type(error).__name__}: {error}",
                fix="install what the plugin needs, or correct its import string",
            ) from error
        _require(
            callable(found), f"the factory of {self.name!r}", self.factory, found, "a callable"
        )
        return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RejectionSamplerFactory(NamedFactory):
    """A rejection sampler that the key `rejection_sampler` can name.

    Attributes:
        accepts_sharded_draft_logits: reads a cache that holds only the owned requests.
        reads_layouts: draft-logits layouts that it reads.
    """

    accepts_sharded_draft_logits: bool = False
    reads_layouts: frozenset[DraftLogitsLayout] = frozenset({DraftLogitsLayout.DENSE})


@dataclass(frozen=True)
class DraftWatermarkerFactory(NamedFactory):
    """A draft watermarker that the key `draft_watermarker` can name.

    Attributes:
        honors_owner_mask: what it stores goes through the owner mask.
    """

    honors_owner_mask: bool = False


@dataclass(frozen=True)
class DraftSetup:
    """What a speculator's declarations may depend on: all that is known before weights are.

    Attributes:
        draft_config: the draft checkpoint's `config.json`; empty when unknown.
        target_config: the target's; empty when unknown.
        num_speculative_tokens: draft tokens a request and step; None when unknown.
        options: the spec's own options, validated; None when it has none or they are unknown.
    """

    draft_config: DraftConfig = field(default_factory=dict)
    target_config: DraftConfig = field(default_factory=dict)
    num_speculative_tokens: int | None = None
    options: Any = None


@dataclass(frozen=True)
class SpeculatorSpec:
    """One speculator: how it is selected, what it can do, and where its code is.

    A spec serves its `methods`. `architectures` and `model_types` narrow it to draft configs that
    name one of either; `predicate` narrows it further. The most narrowed spec that matches is
    selected.

    Attributes:
        name: its own name, unique in its plugin.
        methods: values of the config key `method` that it serves.
        factory: import string `"module:callable"`; called with a `SpeculatorContext`.
        capabilities: static facts, or a function of the `DraftSetup` that answers for an empty one
            too.
        target_needs: the same for what it reads from its host.
        architectures: entries of `architectures` in the draft config.
        model_types: values of `model_type` or `speculators_model_type` in the draft config.
        predicate: further condition on the draft config.
        detects: whether a draft config is certainly one of its own, for a configuration that names
            no method; what narrows a spec detects it as well.
        options_model: pydantic model of its own options; None when it has none.
        api_version: plugin interface that it was written for.
        summary: one line for listings.
        needs_checkpoint: the key `model` must be given.
        may_lie_in_target: without the key `model`, its weights are looked for in the target's
            checkpoint, whose config is then the draft config too.
        default_num_speculative_tokens: function of the draft config: draft tokens a step where the
            configuration does not say; None where the draft config does not say either.
        tiny_subject: import string `"module:callable"` of what `specreg check` proves: called with
            an empty directory, it writes a tiny random drafter there and returns the
            `specreg.testing.Subject`. None is enough for a speculator without a checkpoint, and
            for one with a `random_drafter`.
        random_drafter: import string `"module:callable"`, called with an empty directory and the
            target's `config.json`: writes a randomly initialised drafter of matching shape there
            and returns the speculative configuration that selects it.
    """

    name: str
    methods: tuple[str, ...]
    factory: str
    capabilities: Capabilities | Callable[[DraftSetup], Capabilities]
    target_needs: TargetNeeds | Callable[[DraftSetup], TargetNeeds] = _NO_NEEDS
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    predicate: Callable[[DraftConfig], bool] | None = None
    detects: Callable[[DraftConfig], bool] | None = None
    options_model: type[BaseModel] | None = None
    api_version: int = API_VERSION
    summary: str = ""
    needs_checkpoint: bool = True
    may_lie_in_target: bool = False
    default_num_speculative_tokens: Callable[[DraftConfig], int | None] | None = None
    tiny_subject: str | None = None
    random_drafter: str | None = None

    def __post_init__(self) -> None:
        NamedFactory(self.name, self.factory)
        for import_string in (self.tiny_subject, self.random_drafter):
            if import_string is not None:
                NamedFactory(self.name, import_string)
        owner = f"SpeculatorSpec {self.name!r}"
        for name, may_be_empty in (
            ("methods", False),
            ("architectures", True),
            ("model_types", True),
        ):
            _require_names(owner, name, getattr(self, name), may_be_empty=may_be_empty)
        for name, kind in (("capabilities", Capabilities), ("target_needs", TargetNeeds)):
            value = getattr(self, name)
            is_known = isinstance(value, kind) or callable(value)
            _require(is_known, owner, name, value, f"{kind.__name__}, or a function that gives it")
        for name in ("predicate", "detects", "default_num_speculative_tokens"):
            value = getattr(self, name)
            _require(value is None or callable(value), owner, name, value, "a function or None")
        fields = getattr(self.options_model, "model_fields", None)
        is_model = self.options_model is None or isinstance(fields, dict)
        _require(is_model, owner, "options_model", self.options_model, "a pydantic model or None")
        _require(isinstance(self.summary, str), owner, "summary", self.summary, "one line of text")
        is_version = type(self.api_version) is int and self.api_version >= 1
        _require(is_version, owner, "api_version", self.api_version, f"1 to {API_VERSION}")

    def capabilities_for(self, setup: DraftSetup) -> Capabilities:
        """Capabilities for what is known. Raises `SpecregError`."""
        return self._fact("capabilities", Capabilities, setup)

    def needs_for(self, setup: DraftSetup) -> TargetNeeds:
        """Target needs for what is known. Raises `SpecregError`."""
        return self._fact("target_needs", TargetNeeds, setup)

    def _fact(self, field: str, kind: type[_Fact], setup: DraftSetup) -> _Fact:
        declared = getattr(self, field)
        if isinstance(declared, kind):
            return declared
        try:
            fact = declared(setup)
        except (CheckpointError, ConfigError):  # Config or options are at fault, not the plugin.
            raise
        except Exception as error:
            raise PluginError(
                f"speculator {self.name!r} cannot tell its {field}",
                where=f"SpeculatorSpec {self.name!r}, {field}(setup)",
                got=f"{type(error).__name__}: {error}",
                fix="check the draft config.json; the function must answer for an empty setup too",
            ) from error
        _require(isinstance(fact, kind), f"speculator {self.name!r}", field, fact, kind.__name__)
        return fact  # type: ignore[no-any-return]

    def load_factory(self) -> Callable[..., Any]:
        """Import the factory. Raises `PluginError` with the cause when that fails."""
        return NamedFactory(self.name, self.factory).load_factory()


@dataclass(frozen=True)
class LoadedParts:
    """What exists once weights are loaded, for rules that can only be decided then.

    Attributes:
        target: a `TargetView`.
        speculator: a `Speculator`.
        rejection_sampler: the rejection sampler of the run.
    """

    target: Any
    speculator: Any
    rejection_sampler: Any


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy rule may look at.

    Attributes:
        config: the configuration of the run; its `speculative` part is complete.
        spec: the selected speculator.
        distribution: where that came from.
        setup: what its declarations depend on.
        capabilities: its capabilities for `setup`.
        watermarker: the configured draft watermarker; None when there is none.
        rejection_sampler: the configured rejection sampler; None is the stock one.
        loaded: None before loading.
    """

    config: EngineConfig
    spec: SpeculatorSpec
    distribution: str
    setup: DraftSetup
    capabilities: Capabilities
    watermarker: DraftWatermarkerFactory | None = None
    rejection_sampler: RejectionSamplerFactory | None = None
    loaded: LoadedParts | None = None


class Verdict(NamedTuple):
    """What a rule says about this run.

    Attributes:
        rule: its name.
        passed: None where loading decides.
        reason: one clause; for None it says by what it is decided.
    """

    rule: str
    passed: bool | None
    reason: str


@dataclass(frozen=True)
class PolicyRule:
    """A condition for sharding the draft-logits cache.

    Attributes:
        name: short, lower case, words joined by dashes.
        evaluate: function of `PolicyInputs` that returns `(passed, reason)`. While `inputs.loaded`
            is None it may return None for `passed`. It changes nothing and asks no other rank: the
            answers of the ranks are combined outside.
    """

    name: str
    evaluate: Callable[[PolicyInputs], tuple[bool | None, str]]

    def __post_init__(self) -> None:
        _require(
            isinstance(self.name, str) and self.name != "",
            "PolicyRule",
            "name",
            self.name,
            "a name",
        )
        _require(
            callable(self.evaluate),
            f"PolicyRule {self.name!r}",
            "evaluate",
            self.evaluate,
            "a function",
        )

    def verdict(self, inputs: PolicyInputs) -> Verdict:
        """Evaluate the rule. Raises `PluginError` when it fails or does not answer as agreed."""
        try:
            passed, reason = self.evaluate(inputs)
        except Exception as error:
            raise PluginError(
                f"policy rule {self.name!r} failed",
                where=f"PolicyRule {self.name!r}, evaluate(inputs)",
                got=f"{type(error).__name__}: {error}; allowed: a pair (passed, reason)",
                fix="correct the rule, or disable its plugin with SPECREG_DISABLE_PLUGINS",
            ) from error
        is_answer = isinstance(passed, bool) or (passed is None and inputs.loaded is None)
        _require(
            is_answer,
            f"the answer of policy rule {self.name!r}",
            "passed",
            passed,
            "True or False, and None before loading",
        )
        return Verdict(self.name, passed, str(reason))
