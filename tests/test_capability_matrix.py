"""The product of everything that bears on sharding, against a table written by hand."""

from __future__ import annotations

import importlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from capability_matrix import (
    AXES,
    DRAFT_VOCAB_SIZE,
    FUSED_SAMPLERS,
    KINDS,
    NUM_CANDIDATES,
    REGISTERED,
    TABLE,
    VOCAB_SIZE,
    Named,
    Row,
)
from editable_projects import EXAMPLES
from markov_toys import make_choice
from toy_plugins import ToyPlugin, capabilities, spec

from specreg import policy
from specreg.capabilities import CacheDtype, DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.errors import PolicyError, SpecregError
from specreg.plan import DraftLogitsPlan
from specreg.plugin import DraftWatermarkerFactory, PolicyRule, RejectionSamplerFactory
from specreg.registry import Registry, get_registry
from specreg.rules import CORE_RULES
from specreg.specs import PolicyInputs

Combination = Mapping[str, str]
DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout
K = 3
SLOTS = {("1", "enough"): 5, ("2", "enough"): 2, ("4", "enough"): 6}
SLOTS |= {("2", "below tp"): 1, ("4", "below tp"): 3}
READS = {"stock": frozenset(DraftLogitsLayout), "custom": frozenset({DENSE})}
READS["declared"] = READS["stock"]

CAPABILITIES = {
    "dense": capabilities(),
    "argmax only": capabilities(supports_probabilistic=False),
    "unmasked": capabilities(honors_owner_mask=False),
    "dense in fp32": capabilities(cache_dtype=CacheDtype.FLOAT32),
    "reduced": capabilities(
        layouts=frozenset({DENSE, DRAFT_VOCAB}), draft_vocab_size=DRAFT_VOCAB_SIZE
    ),
    "candidates": capabilities(
        layouts=frozenset({DENSE, TOP_K}),
        num_candidates=NUM_CANDIDATES,
        cache_dtype=CacheDtype.FLOAT32,
    ),
    "candidates only": capabilities(layouts=frozenset({TOP_K}), num_candidates=NUM_CANDIDATES),
}
PARTS = ToyPlugin(
    *(spec(kind, capabilities=facts) for kind, facts in CAPABILITIES.items()),
    name="kinds",
    rejection_samplers=[
        RejectionSamplerFactory("custom", "m:make"),
        RejectionSamplerFactory(
            "declared", "m:make", accepts_sharded_draft_logits=True, reads_layouts=READS["stock"]
        ),
    ],
    draft_watermarkers=[
        DraftWatermarkerFactory("unmasked", "m:make"),
        DraftWatermarkerFactory("masked", "m:make", honors_owner_mask=True),
    ],
)


@dataclass(frozen=True)
class Subject:
    """A speculator to expand the product for."""

    named: Named
    registry: Registry
    speculative: Mapping[str, Any]

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.named.exceptions, *TABLE)


def subject_of_kind(kind: str) -> Subject:
    return Subject(Named(kind), Registry.from_plugins([PARTS]), {"method": kind})


def subject_of_registered(name: str, folder: Any) -> Subject:
    """The installed speculator itself, beside the samplers and watermarkers of this test."""
    named, installed = REGISTERED[name], get_registry()
    entry = next(entry for entry in installed.speculators if entry.spec.name == name)
    parts = Registry.from_plugins([PARTS]).plugins
    others = tuple(replace(plugin, speculators=()) for plugin in parts)
    speculative: dict[str, Any] = {"method": entry.spec.methods[0], "plugin": entry.distribution}
    if entry.spec.needs_checkpoint:
        (folder / "config.json").write_text(json.dumps(dict(named.draft_config)))
        speculative["model"] = str(folder)
    return Subject(named, Registry((*installed.plugins, *others)), speculative)


class Target(SimpleNamespace):
    vocab_size, dtype = VOCAB_SIZE, "torch.bfloat16"


class LocalTarget(Target):
    def compute_logits_local(self, hidden_states: Any) -> Any:
        raise AssertionError("planning does not compute")


def combinations(kind: str) -> Iterator[dict[str, str]]:
    """Every combination of the axes; those that only differ in `loading` follow each other."""
    for values in itertools.product(*AXES.values()):
        combination = dict(zip(AXES, values, strict=True), kind=kind)
        if (combination["tp"], combination["slots"]) in SLOTS:
            yield combination


def config_of(subject: Subject, combination: Combination) -> EngineConfig:
    watermarker, sampler = combination["watermarker"], combination["sampler"]
    return EngineConfig.parse(
        {
            "speculative": {
                **subject.speculative,
                "num_speculative_tokens": K,
                "draft_sample_method": combination["sampling"],
            },
            "tensor_parallel_size": int(combination["tp"]),
            "max_num_seqs": SLOTS[combination["tp"], combination["slots"]],
            "enable_batch_sharded_sampling": combination["batch_sharded"] == "on",
            "draft_watermarker": None if watermarker == "none" else watermarker,
            "rejection_sampler": None if sampler == "stock" else sampler,
            "draft_logits_sharding": combination["sharding"],
            "draft_logits_layout": combination["layout"],
            "vocab_size": VOCAB_SIZE,
            "dtype": "bfloat16",
        }
    )


def load(
    plan: DraftLogitsPlan, combination: Combination, opt_out_reason: str | None = None
) -> DraftLogitsPlan:
    """The final plan; a reason that is given decides the opt-in, else the combination does."""
    loading, sampler = combination["loading"], combination["sampler"]
    opts_in = loading != "opt-in withdrawn" if opt_out_reason is None else not opt_out_reason
    return policy.finalize(
        plan,
        Target() if loading == "no local logits" else LocalTarget(),
        SimpleNamespace(supports_batch_sharded_draft_logits=lambda: opts_in),
        SimpleNamespace(
            accepts_sharded_draft_logits=sampler != "custom", reads_layouts=READS[sampler]
        ),
    )


def refusal(error: SpecregError) -> tuple[Any, ...]:
    return ("refused", type(error), error.where)


def outcome(plan: DraftLogitsPlan) -> tuple[Any, ...]:
    return (
        plan.num_shards,
        plan.layout.value if plan.layout else None,
        plan.bytes_per_rank,
        plan.replicated_bytes_per_rank,
        [verdict.rule for verdict in plan.failed_verdicts],
    )


def expected(subject: Subject, combination: Combination) -> tuple[Row, tuple[Any, ...]]:
    """The one row that a combination belongs to, and what the table says of it."""
    matching = [row for row in subject.rows if row.matches(combination)]
    assert matching, f"no row for {combination}"
    row = matching[0]
    named = {row.rule for row in matching if row.rule}
    core = [rule.name for rule in CORE_RULES]
    failing = [name for name in core if name in named] + sorted(named.difference(core))
    if row.cache == "refused":
        where = ", ".join(failing) if row.rule else "config.draft_logits_layout"
        return row, ("refused", PolicyError, where)
    if row.cache == "none":
        return row, (1, None, 0, 0, failing)
    layouts = KINDS[combination["kind"]].layouts
    layout = row.layout
    if layout == "wanted":
        layout = combination["layout"]
        layout = next(iter(layouts)) if layout == "auto" else layout
    width, element_bytes = layouts[layout]
    num_shards = int(combination["tp"]) if row.cache == "sharded" else 1
    slots = SLOTS[combination["tp"], combination["slots"]]
    rows = -(-slots // num_shards)
    row_bytes = K * width * element_bytes
    return row, (num_shards, layout, rows * row_bytes, slots * row_bytes, failing)


def compare(subject: Subject) -> Iterator[tuple[Row, Combination, Any, Any]]:
    """Row, combination, what the policy says and what the table says, for all that can be run."""
    plan: DraftLogitsPlan | None = None
    for combination in combinations(subject.named.kind):
        row, wanted = expected(subject, combination)
        try:
            if combination["loading"] == "not yet":
                plan = None
                plan = policy.resolve(config_of(subject, combination), subject.registry)
                found = outcome(plan)
            elif plan is None:
                continue  # It was refused, so nothing is ever loaded.
            else:
                found = outcome(load(plan, combination))
        except SpecregError as error:
            found = refusal(error)
        yield row, combination, found, wanted


def differences(subject: Subject) -> Iterator[str]:
    for row, combination, found, wanted in compare(subject):
        if found != wanted:
            yield f"row {row.reason!r}: {found}, not {wanted}, for {dict(combination)}"


@pytest.fixture(scope="module")
def reached() -> Counter[str]:
    """How many combinations of each row were right; a difference ends the module."""
    counts: Counter[str] = Counter()
    for kind in KINDS:
        for row, combination, found, wanted in compare(subject_of_kind(kind)):
            assert found == wanted, (row.reason, combination)
            counts[row.reason] += 1
    return counts


def test_every_combination_comes_to_what_its_row_says(reached):
    assert sum(reached.values()) > 2000 * len(KINDS)


def test_every_row_is_reached_and_tells_a_reason_of_its_own(reached):
    reasons = [row.reason for row in TABLE]
    assert len(set(reasons)) == len(reasons)
    assert [reason for reason in reasons if not reached[reason]] == []


def test_the_table_is_short_enough_to_be_read():
    exceptions = sum(len(named.exceptions) for named in REGISTERED.values())
    assert len(TABLE) + exceptions <= 40


def test_every_speculator_of_this_distribution_is_named_with_its_kind():
    installed = {e.spec.name for e in get_registry().speculators if e.distribution == "specreg"}
    assert installed == set(REGISTERED), "name the speculator's kind in tests/capability_matrix.py"
    assert {named.kind for named in REGISTERED.values()} <= set(KINDS)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_speculator_behaves_like_its_kind(name, tmp_path):
    found = list(itertools.islice(differences(subject_of_registered(name, tmp_path)), 3))
    assert found == []


@pytest.mark.parametrize("name", FUSED_SAMPLERS)
def test_a_fused_sampler_of_dspark_comes_to_what_it_is_seen_to_write(name, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "specreg-markov-samplers"))
    plugin = importlib.import_module("specreg_markov_samplers")
    reasons = {
        tp: make_choice(plugin, tp=int(tp), fused_sampler=name).opt_out_reason for tp in AXES["tp"]
    }
    subject, num_plans = subject_of_kind("dense"), 0
    for combination in combinations("dense"):
        tp = combination["tp"]
        if combination["loading"] != FUSED_SAMPLERS[name][tp]:
            continue
        try:
            plan = policy.resolve(config_of(subject, combination), subject.registry)
        except SpecregError:
            continue  # Nothing is ever loaded.
        try:
            found = outcome(load(plan, combination, reasons[tp]))
        except SpecregError as error:
            found = refusal(error)
        num_plans += 1
        assert found == expected(subject, combination)[1], combination
    assert num_plans > 100


def negated(rule: PolicyRule) -> PolicyRule:
    def evaluate(inputs: PolicyInputs) -> tuple[bool | None, str]:
        passed, reason = rule.evaluate(inputs)
        return None if passed is None else not passed, reason

    return PolicyRule(rule.name, evaluate)


def always(answer: bool) -> Callable[[PolicyRule], PolicyRule]:
    return lambda rule: PolicyRule(rule.name, lambda inputs: (answer, "whatever the run"))


MUTATIONS = {"negated": negated, "always true": always(True), "always false": always(False)}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("index", range(len(CORE_RULES)), ids=[r.name for r in CORE_RULES])
def test_a_rule_that_is_changed_makes_a_row_fail(index, mutation, monkeypatch):
    rules = list(CORE_RULES)
    rules[index] = MUTATIONS[mutation](rules[index])
    monkeypatch.setattr(policy, "CORE_RULES", tuple(rules))
    assert any(True for kind in KINDS for _ in differences(subject_of_kind(kind)))


def test_a_speculator_of_another_kind_than_named_makes_a_row_fail():
    for kind, other in (("dense", "unmasked"), ("dense", "dense in fp32"), ("reduced", "dense")):
        assert next(differences(replace(subject_of_kind(kind), named=Named(other))), None)
