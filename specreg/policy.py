"""From what a run is configured with to the plan of its draft-logits cache.

`resolve` needs neither weights nor torch and may have to leave rules to loading; `finalize` decides
them with the loaded parts and with the answers of all ranks, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, TypeVar

from specreg.capabilities import CacheDtype, DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.errors import ConfigError, InternalError, PluginError, PolicyError
from specreg.memory import CacheSize, draft_logits_size
from specreg.model_config import dtype_of, read_model_config, vocab_size_of
from specreg.ownership import rows_per_rank
from specreg.plan import DraftLogitsPlan
from specreg.registry import Registry, get_registry
from specreg.rules import CORE_RULES, batch_sharded_sampling_enabled, keeps_draft_logits
from specreg.specs import LoadedParts, PolicyInputs, PolicyRule, Verdict

__all__ = [
    "DraftLogitsPlan",
    "Verdict",
    "batch_sharded_sampling_enabled",
    "finalize",
    "resolve",
]

_Value = TypeVar("_Value")
_DENSE = frozenset({DraftLogitsLayout.DENSE})


def resolve(config: EngineConfig, registry: Registry | None = None) -> DraftLogitsPlan:
    """The provisional plan of a run, from its configuration and static facts.

    Args:
        config: the run. Checkpoints that it names may be absent when `vocab_size` and `dtype` are
            given.
        registry: what is installed; None takes the process's.

    Raises:
        ConfigError: nothing to plan, no speculator for it, or the vocabulary or dtype is unknown.
        PolicyError: a required sharding or a named layout is not possible.
    """
    if config.speculative is None:
        raise ConfigError(
            "there is no draft-logits cache to plan",
            where="config.speculative",
            got="null; allowed: a speculative configuration",
            fix="set 'speculative_config', with 'method' or 'model'",
        )
    registry = registry or get_registry()
    target_config = read_model_config(config.target) or {}
    draft_config = read_model_config(config.speculative.model)
    selection = registry.select(config.speculative, draft_config, target_config)
    watermarker, sampler = config.draft_watermarker, config.rejection_sampler
    inputs = PolicyInputs(
        config=config.model_copy(update={"speculative": selection.speculative}),
        spec=selection.spec,
        distribution=selection.distribution,
        setup=selection.setup,
        capabilities=selection.capabilities,
        watermarker=None if watermarker is None else registry.draft_watermarker(watermarker),
        rejection_sampler=None if sampler is None else registry.rejection_sampler(sampler),
    )
    rules = (*CORE_RULES, *registry.policy_rules)
    names = [rule.name for rule in rules]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise PluginError(
            "two policy rules have one name",
            where=f"policy rules {', '.join(repeated)}",
            got=f"rules {', '.join(names)}; allowed: each name once, and none of the core's",
            fix="disable one of the plugins with SPECREG_DISABLE_PLUGINS",
        )
    return _plan(
        inputs,
        rules,
        tuple(rule.verdict(inputs) for rule in rules),
        vocab_size=config.vocab_size or vocab_size_of(target_config),
        dtype=dtype_of(target_config) if config.dtype == "auto" else config.dtype,
    )


def finalize(
    plan: DraftLogitsPlan,
    target: Any,
    speculator: Any,
    rejection_sampler: Any,
    *,
    shard_idx: int = 0,
    all_ranks_agree: Callable[[bool], bool] = bool,
) -> DraftLogitsPlan:
    """The final plan, once weights are loaded and before anything is allocated.

    Args:
        plan: what `resolve` gave, the same on every rank.
        target: the loaded `TargetView`; its vocabulary and dtype replace those read from configs.
        speculator: the loaded `Speculator`.
        rejection_sampler: that of the run; it declares `accepts_sharded_draft_logits` and
            `reads_layouts`, and without them reads a replicated dense cache only.
        shard_idx: this rank.
        all_ranks_agree: says whether every rank passed True. Called once a rule, in the same order
            on every rank; the default is for one rank.

    Raises:
        ConfigError: the target has another vocabulary than was configured.
        PolicyError: a required sharding or a named layout is not possible.
    """
    inputs = replace(plan.inputs, loaded=LoadedParts(target, speculator, rejection_sampler))
    configured = inputs.config.vocab_size
    if configured is not None and configured != target.vocab_size:
        raise ConfigError(
            "the target has another vocabulary than was configured",
            where="config.vocab_size",
            got=f"{configured}; allowed: {target.vocab_size}, as the loaded target has",
            fix="remove the key: it is for planning without the target",
        )
    verdicts = []
    for rule in plan.rules:
        verdict = rule.verdict(inputs)
        if not all_ranks_agree(verdict.passed is True) and verdict.passed:
            verdict = Verdict(rule.name, False, "another rank answered no")
        verdicts.append(verdict)
    final = _plan(
        inputs,
        plan.rules,
        tuple(verdicts),
        vocab_size=target.vocab_size,
        dtype=str(target.dtype).removeprefix("torch."),
        shard_idx=shard_idx,
    )
    if final.num_shards > 1 and not batch_sharded_sampling_enabled(inputs.config, target):
        raise InternalError(
            "a sharded draft-logits cache was planned without batch-sharded sampling",
            where="DraftLogitsPlan.num_shards",
            got=f"{final.num_shards}; allowed: 1",
            fix="report this: the rule batch-sharded-sampling was not applied",
        )
    return final


def _plan(
    inputs: PolicyInputs,
    rules: tuple[PolicyRule, ...],
    verdicts: tuple[Verdict, ...],
    *,
    vocab_size: int | None,
    dtype: str | None,
    shard_idx: int = 0,
) -> DraftLogitsPlan:
    config, capabilities = inputs.config, inputs.capabilities
    speculative = config.speculative
    assert speculative is not None
    assert speculative.num_speculative_tokens is not None
    failed = [verdict for verdict in verdicts if verdict.passed is False]
    if config.draft_logits_sharding == "require" and failed:
        raise PolicyError(
            "the draft-logits cache cannot be sharded, which draft_logits_sharding requires",
            where=", ".join(verdict.rule for verdict in failed),
            got="; ".join(f"{verdict.rule}: {verdict.reason}" for verdict in failed),
            fix="make these rules hold, or set draft_logits_sharding to 'auto'",
        )
    is_sharded = not failed and config.draft_logits_sharding != "off"
    num_shards = config.tensor_parallel_size if is_sharded else 1
    possible: dict[DraftLogitsLayout, CacheSize] = {}
    layout = size = replicated = None
    if keeps_draft_logits(inputs):
        possible = _possible_layouts(inputs, num_shards, vocab_size, dtype)
        layout = _choose_layout(inputs, possible)
        size = possible[layout]
        replicated = _possible_layouts(inputs, 1, vocab_size, dtype)[layout]
    return DraftLogitsPlan(
        inputs=inputs,
        rules=rules,
        method=speculative.method or "",
        speculator=inputs.spec.name,
        distribution=inputs.distribution,
        tensor_parallel_size=config.tensor_parallel_size,
        max_num_seqs=config.max_num_seqs,
        num_speculative_tokens=speculative.num_speculative_tokens,
        vocab_size=vocab_size or 0,
        draft_vocab_size=capabilities.draft_vocab_size,
        num_candidates=capabilities.num_candidates,
        num_shards=num_shards,
        shard_idx=shard_idx if is_sharded else 0,
        rows_per_rank=size.shape[0] if size else 0,
        layout=layout,
        dtype=size.dtype if size else None,
        shape=size.shape if size else (),
        bytes_per_rank=size.logits_bytes if size else 0,
        side_bytes_per_rank=size.side_bytes if size else 0,
        replicated_bytes_per_rank=replicated.logits_bytes if replicated else 0,
        possible_layouts=possible,
        provisional=inputs.loaded is None,
        verdicts=verdicts,
    )


def _possible_layouts(
    inputs: PolicyInputs, num_shards: int, vocab_size: int | None, dtype: str | None
) -> dict[DraftLogitsLayout, CacheSize]:
    """Size a rank of each layout that the speculator writes and the rejection sampler reads."""
    capabilities, speculative = inputs.capabilities, inputs.config.speculative
    assert speculative is not None
    assert speculative.num_speculative_tokens is not None
    if capabilities.cache_dtype is CacheDtype.FLOAT32:
        dtype = "float32"
    reads = _layouts_read(inputs)
    draft_vocab_size, num_candidates = capabilities.draft_vocab_size, capabilities.num_candidates
    is_reduced = draft_vocab_size is not None and draft_vocab_size != vocab_size
    has_facts = {
        DraftLogitsLayout.DENSE: True,
        DraftLogitsLayout.DRAFT_VOCAB: is_reduced and num_candidates is None,
        DraftLogitsLayout.TOP_K: num_candidates is not None,
    }
    return {
        layout: draft_logits_size(
            layout,
            rows=rows_per_rank(inputs.config.max_num_seqs, num_shards),
            num_speculative_tokens=speculative.num_speculative_tokens,
            vocab_size=_known(vocab_size, inputs, "vocab_size", "--vocab-size"),
            dtype=_known(dtype, inputs, "dtype", "--dtype"),
            draft_vocab_size=draft_vocab_size,
            num_candidates=num_candidates,
        )
        for layout in DraftLogitsLayout
        if layout in capabilities.layouts and layout in reads and has_facts[layout]
    }


def _layouts_read(inputs: PolicyInputs) -> Set[DraftLogitsLayout]:
    """Layouts that the rejection sampler reads, as far as is known by now."""
    declared = inputs.rejection_sampler
    reads: Set[DraftLogitsLayout] = (
        frozenset(DraftLogitsLayout) if declared is None else declared.reads_layouts
    )
    if inputs.loaded is not None:
        reads = reads & getattr(inputs.loaded.rejection_sampler, "reads_layouts", _DENSE)
    return reads


def _known(value: _Value | None, inputs: PolicyInputs, field: str, flag: str) -> _Value:
    if value is None:
        target = inputs.config.target
        raise ConfigError(
            f"the draft-logits cache cannot be sized without the target's {field}",
            where=f"config.{field}",
            got=f"null, and target {target!r} tells nothing; allowed: a value, or a target whose "
            "config.json has it",
            fix=f"pass {flag}, or name a target directory that is there",
        )
    return value


def _choose_layout(
    inputs: PolicyInputs, possible: Mapping[DraftLogitsLayout, CacheSize]
) -> DraftLogitsLayout:
    """The layout that was named, or the smallest possible one."""
    wanted = inputs.config.draft_logits_layout
    if possible and wanted == "auto":
        return min(possible, key=lambda layout: possible[layout].total_bytes)
    for layout in possible:
        if layout.value == wanted:
            return layout
    names = ", ".join(layout.value for layout in possible) or "none"
    writes = ", ".join(sorted(layout.value for layout in inputs.capabilities.layouts))
    reads = ", ".join(sorted(layout.value for layout in _layouts_read(inputs)))
    raise PolicyError(
        f"the draft-logits layout {wanted!r} is not possible",
        where="config.draft_logits_layout",
        got=f"{wanted!r}; possible: {names} (speculator {inputs.spec.name} writes "
        f"{writes or 'none'}, the rejection sampler reads {reads or 'none'})",
        fix="name a possible one, or 'auto'" if possible else "choose another sampler",
    )
