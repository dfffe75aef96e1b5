"""The protocol: methods, signatures, and what they return."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from specreg.capabilities import FusedSampling
from specreg.errors import ConfigError, PolicyError, SpecregError
from specreg.policy import resolve
from specreg.speculator import Speculator
from specreg.testing.checks.matrix import combinations, each, violations
from specreg.testing.checks.result import Case, Check, failed, not_run, passed, told, verdict
from specreg.testing.kit_watermark import WATERMARKER
from specreg.testing.lab import Lab
from specreg.testing.loading import load_speculator
from specreg.testing.observed import Twist
from specreg.testing.settings import Settings

__all__ = ["CHECKS"]

METHODS = (
    "load_model",
    "weight_bytes",
    "supports_batch_sharded_draft_logits",
    "allocate_draft_logits",
    "bind",
    "propose",
    "release",
)


def signatures(lab: Lab) -> Iterator[Case]:
    """Methods are there and take what a host passes."""
    speculator, _ = load_speculator(lab)
    for attribute in ("spec", "draft_logits"):
        missing = [] if hasattr(speculator, attribute) else ["the attribute is missing"]
        yield verdict(attribute, missing)
    for name in METHODS:
        wanted = inspect.signature(getattr(Speculator, name))
        arguments = [object()] * (len(wanted.parameters) - 1)
        method = getattr(speculator, name, None)
        if not callable(method):
            yield failed(name, "the method is missing")
            continue
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            yield failed(name, f"cannot be called as {name}{wanted}: {error}")
        else:
            yield passed(name)
    num_bytes: Any = speculator.weight_bytes()
    wrong = [] if type(num_bytes) is int and num_bytes >= 0 else [f"{num_bytes!r}; allowed: >= 0"]
    yield verdict("weight_bytes() is a number of bytes", wrong)


def output(lab: Lab) -> Iterator[Case]:
    """What `propose` returns, in every combination."""

    def problems(settings: Settings) -> list[str]:
        return violations(lab.run(settings, "mixed"), "output")

    yield from each(lab, combinations(lab), problems)


def door(lab: Lab) -> Iterator[Case]:
    """Drafts come from the sampler, unless fused sampling is declared."""
    if not lab.has_cache:
        yield passed("no drafts are stored: they are verified as one-hot, whoever chose them")
        return

    def problems(settings: Settings) -> list[str]:
        run = lab.run(settings, "mixed")
        return violations(run, "door", "store")

    yield from each(lab, combinations(lab), problems)


def declared_sharding(lab: Lab) -> Iterator[Case]:
    """`honors_owner_mask` as declared decides sharding."""
    tp = max((tp for tp in lab.tps if tp > 1), default=0)
    declares = lab.capabilities.honors_owner_mask and lab.has_cache
    if not tp:
        yield not_run("sharded", "needs a tp above 1; allowed: --tp 2")
        return
    if declares:
        for each_tp in (tp for tp in lab.tps if tp > 1):
            name = f"declared, and sharded at tp {each_tp}"
            plan = lab.run(lab.plain(each_tp), "alone").plan
            assert plan is not None
            reasons = [f"{v.rule}: {v.reason}" for v in plan.failed_verdicts]
            opts_in = {"speculator-opts-in"} >= {v.rule for v in plan.failed_verdicts}
            may_withdraw = lab.capabilities.fused_sampling is not FusedSampling.NONE
            if reasons and opts_in and may_withdraw:
                yield passed(f"withdrawn at load for the fused sampler, tp {each_tp}")
            else:
                yield not_run(name, "; ".join(reasons)) if reasons else passed(name)
        return
    try:
        plan = resolve(lab.config(lab.plain(tp, sharding="require")), lab.registry)
    except PolicyError:
        yield passed("not declared, and refused where it is required")
    else:
        yield failed("not declared, and refused", f"a plan with {plan.num_shards} shards")


def declared_layouts(lab: Lab) -> Iterator[Case]:
    """Declared layouts are planned, others are refused."""
    declared = {layout.value for layout in lab.capabilities.layouts} if lab.has_cache else set()
    for name in ("dense", "draft_vocab", "top_k"):
        settings = lab.plain(layout=name)
        if name not in declared:
            if lab.has_cache:
                try:
                    resolve(lab.config(settings), lab.registry)
                except PolicyError:
                    yield passed(f"{name}: not declared, and refused")
                else:
                    yield failed(f"{name}: not declared, and refused", "it was planned")
        elif name not in lab.layouts:
            yield not_run(f"{name}: declared", "its size is not declared for this draft config")
        else:
            try:
                plan = lab.run(settings, "alone").plan
            except SpecregError as error:
                yield failed(f"{name}: declared, and used", told(error))
            else:
                layout = plan.layout if plan is not None else None
                wrong = [] if layout is not None and layout.value == name else [f"got {layout}"]
                yield verdict(f"{name}: declared, and used", wrong)
    if not lab.has_cache:
        yield passed("no layout: it keeps no draft logits")


def declared_probabilistic(lab: Lab) -> Iterator[Case]:
    """A cache exists exactly where probabilistic drafts are declared and asked for."""
    for drafts in ("greedy", "probabilistic"):
        wants = drafts == "probabilistic" and lab.has_cache
        run = lab.run(lab.plain(drafts=drafts), "trio")
        assert run.plan is not None
        wrong = [] if run.plan.has_cache == wants else [f"a cache of {run.plan.bytes_per_rank} B"]
        yield verdict(f"{drafts}: {'a' if wants else 'no'} cache", wrong)


def declared_fused_sampling(lab: Lab) -> Iterator[Case]:
    """A full-cache sampler is never handed a shard."""
    fused = lab.capabilities.fused_sampling
    claims = lab.capabilities.honors_owner_mask
    if fused is not FusedSampling.FULL_CACHE:
        yield passed(f"{fused.value}: drafts and bytes are checked in every run")
        return
    if not claims:
        yield passed("full_cache: sharding is refused")
        return
    several = [tp for tp in lab.tps if tp > 1]
    if not several:
        yield not_run("full_cache: withdrawn at load", "needs a tp above 1; allowed: --tp 2")
    for tp in several:
        plan = lab.run(lab.plain(tp), "alone").plan
        assert plan is not None
        wrong = [] if plan.num_shards == 1 else ["full_cache, and yet sharded"]
        yield verdict(f"full_cache: withdrawn at load, tp {tp}", wrong)


def declared_watermarker(lab: Lab) -> Iterator[Case]:
    """With a keyed watermarker: it draws as without one, or the run is refused."""
    settings = [lab.plain(tp, watermarker=WATERMARKER) for tp in lab.tps]
    if lab.capabilities.supports_watermarker:
        yield from each(
            lab,
            settings,
            lambda s: violations(lab.run(s, "trio"), "bytes", "door", "store", "kv", "output"),
        )
        return
    try:
        lab.run(settings[0], "trio")
    except ConfigError:
        yield passed("not declared, and refused")
    else:
        yield failed("not declared, and refused", "it ran with a draft watermarker")


def declared_graph_safe(lab: Lab) -> Iterator[Case]:
    """`draft` waits for nothing; what a CPU can show of being captured in a graph."""
    if not lab.capabilities.is_cuda_graph_safe:
        yield passed("not declared, and so never captured")
        return
    run = lab.run(lab.plain(twist=Twist.WATCHED), "pair")
    yield verdict("declared, and draft() reads no value on the host", violations(run, "sync"))


CHECKS = (
    Check("protocol: methods and signatures", signatures),
    Check("protocol: shape, type and range of drafts", output),
    Check("protocol: drafts come through the sampler", door),
    Check("capabilities: honors_owner_mask", declared_sharding),
    Check("capabilities: layouts", declared_layouts),
    Check("capabilities: supports_probabilistic", declared_probabilistic),
    Check("capabilities: fused_sampling", declared_fused_sampling),
    Check("capabilities: supports_watermarker", declared_watermarker),
    Check("capabilities: is_cuda_graph_safe", declared_graph_safe),
)
