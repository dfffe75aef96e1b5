from __future__ import annotations

import dataclasses
import sys

import pytest
from toy_plugins import capabilities, spec

from specreg.capabilities import Capabilities, DraftingStyle, TargetNeeds
from specreg.errors import CheckpointError, ConfigError, PluginError
from specreg.specs import DraftSetup, NamedFactory, PolicyInputs, PolicyRule, Verdict


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"methods": ()}, "methods"),
        ({"methods": "toy"}, "methods"),
        ({"methods": ("toy", "")}, "methods"),
        ({"architectures": ["A"]}, "architectures"),
        ({"model_types": (1,)}, "model_types"),
        ({"factory": "toy_module"}, "factory"),
        ({"factory": "toy_module:"}, "factory"),
        ({"factory": "toy module:make"}, "factory"),
        ({"factory": print}, "factory"),
        ({"capabilities": None}, "capabilities"),
        ({"target_needs": {}}, "target_needs"),
        ({"predicate": "x"}, "predicate"),
        ({"options_model": dict}, "options_model"),
        ({"api_version": 0}, "api_version"),
        ({"api_version": "1"}, "api_version"),
    ],
)
def test_a_spec_that_is_declared_wrongly_names_the_field(changes, field):
    with pytest.raises(PluginError, match=rf"not declared correctly\n +where: {field}\n"):
        spec(**changes)


def test_a_spec_is_frozen_and_does_not_import_its_factory():
    toy = spec(factory="no_such_module:make")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        toy.name = "other"


def test_a_factory_is_imported_when_it_is_asked_for():
    assert spec(factory="os.path:join").load_factory() is sys.modules["os.path"].join
    assert spec(factory="pathlib:Path.cwd").load_factory()()


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("no_such_module:make", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("os:no_such_function", "AttributeError"),
    ],
)
def test_a_factory_that_cannot_be_imported_says_why(factory, cause):
    with pytest.raises(PluginError, match=rf"factory of 'toy' cannot be imported[\s\S]*{cause}"):
        NamedFactory("toy", factory).load_factory()


def test_a_factory_that_cannot_be_called_is_refused():
    with pytest.raises(PluginError, match="allowed: a callable"):
        NamedFactory("toy", "os:sep").load_factory()


def test_capabilities_and_needs_are_data_or_a_function_of_the_setup():
    def from_setup(setup):
        return capabilities(draft_vocab_size=setup.draft_config.get("draft_vocab_size"))

    toy = spec(
        capabilities=from_setup,
        target_needs=lambda setup: TargetNeeds(prefill_lookahead=setup.num_speculative_tokens or 1),
    )
    assert toy.capabilities_for(DraftSetup({"draft_vocab_size": 7})).draft_vocab_size == 7
    assert toy.needs_for(DraftSetup()).prefill_lookahead == 1
    assert toy.needs_for(DraftSetup(num_speculative_tokens=3)).prefill_lookahead == 3
    assert spec().needs_for(DraftSetup()) == TargetNeeds()


def test_a_capability_function_that_fails_names_the_speculator():
    with pytest.raises(PluginError, match=r"'toy' cannot tell its capabilities[\s\S]*KeyError"):
        spec(capabilities=lambda setup: setup.draft_config["absent"]).capabilities_for(DraftSetup())
    with pytest.raises(PluginError, match="allowed: TargetNeeds"):
        spec(target_needs=lambda setup: None).needs_for(DraftSetup())


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError])
def test_a_declaration_tells_a_fault_of_the_config_as_it_is(kind):
    def fails(setup):
        raise kind("too many", where="here", got="9; allowed: 8", fix="lower it")

    with pytest.raises(kind, match="too many"):
        spec(capabilities=fails).capabilities_for(DraftSetup())


def test_undeclared_capabilities_are_the_safe_ones():
    undeclared = Capabilities(style=DraftingStyle.PARALLEL)
    assert not undeclared.honors_owner_mask
    assert not undeclared.supports_probabilistic
    assert not undeclared.supports_watermarker


def inputs(loaded=None) -> PolicyInputs:
    return PolicyInputs(
        config=None,
        spec=spec(),
        distribution="toy-dist",
        setup=DraftSetup(),
        capabilities=capabilities(),
        loaded=loaded,
    )


def test_a_policy_rule_answers_with_a_reason_and_may_leave_it_to_loading():
    assert PolicyRule("odd", lambda i: (True, "as it is")).verdict(inputs()) == Verdict(
        "odd", True, "as it is"
    )
    assert PolicyRule("odd", lambda i: (None, "later")).verdict(inputs()).passed is None


@pytest.mark.parametrize("answer", ["yes", (1, "one"), None, (True, "a", "b")])
def test_a_policy_rule_that_does_not_answer_as_agreed_is_an_error(answer):
    with pytest.raises(PluginError, match="policy rule 'odd'"):
        PolicyRule("odd", lambda i: answer).verdict(inputs())


def test_a_policy_rule_cannot_be_undecided_after_loading():
    with pytest.raises(PluginError, match="None before loading"):
        PolicyRule("odd", lambda i: (None, "later")).verdict(inputs(loaded=object()))


def test_a_policy_rule_that_raises_is_named():
    with pytest.raises(PluginError, match=r"policy rule 'odd' failed[\s\S]*ZeroDivisionError"):
        PolicyRule("odd", lambda i: 1 / 0).verdict(inputs())


@pytest.mark.parametrize(("name", "evaluate"), [("", print), ("odd", None)])
def test_a_policy_rule_that_is_declared_wrongly_is_refused(name, evaluate):
    with pytest.raises(PluginError, match="not declared correctly"):
        PolicyRule(name, evaluate)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"style": "parallel"}, "style"),
        ({"layouts": ("dense",)}, "layouts"),
        ({"honors_owner_mask": "yes"}, "honors_owner_mask"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"num_candidates": True}, "num_candidates"),
    ],
)
def test_capabilities_of_a_wrong_type_are_refused_by_field(changes, field):
    with pytest.raises(PluginError, match=f"Capabilities.{field}"):
        Capabilities(**{"style": DraftingStyle.PARALLEL, **changes})
