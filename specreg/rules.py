"""The core's conditions for sharding the draft-logits cache, in the order that they are told."""

from __future__ import annotations

from typing import Any

from specreg.config import EngineConfig
from specreg.errors import PluginError
from specreg.specs import PolicyInputs, PolicyRule

__all__ = ["CORE_RULES", "batch_sharded_sampling_enabled", "keeps_draft_logits"]

Answer = tuple[bool | None, str]


def batch_sharded_sampling_enabled(config: EngineConfig, target: Any = None) -> bool | None:
    """Whether each rank samples and verifies only the requests that it owns.

    This one function decides it for the plan and for whoever creates the `BatchSharder`.

    Args:
        config: the run.
        target: a `TargetView`; None before loading.

    Returns:
        None when only the target can tell, and there is none yet.
    """
    return _batch_sharded_sampling(config, target)[0]


def _batch_sharded_sampling(config: EngineConfig, target: Any) -> Answer:
    tp_size, max_num_seqs = config.tensor_parallel_size, config.max_num_seqs
    if not config.enable_batch_sharded_sampling:
        return False, "enable_batch_sharded_sampling is off"
    if tp_size == 1:
        return False, "tensor_parallel_size is 1"
    if max_num_seqs < tp_size:
        return False, f"max_num_seqs {max_num_seqs} is below tensor_parallel_size {tp_size}"
    if target is None:
        return None, "decided by whether the loaded target implements compute_logits_local"
    if not callable(getattr(target, "compute_logits_local", None)):
        return False, f"target {type(target).__name__} does not implement compute_logits_local"
    return True, f"{tp_size} ranks share {max_num_seqs} requests"


def keeps_draft_logits(inputs: PolicyInputs) -> bool:
    """Whether there is a draft-logits cache at all, sharded or not."""
    return _probabilistic_drafts(inputs)[0] is True


def _probabilistic_drafts(inputs: PolicyInputs) -> Answer:
    speculative = inputs.config.speculative
    if speculative is None or speculative.draft_sample_method != "probabilistic":
        return False, "draft_sample_method is greedy: there are no draft logits to keep"
    if not inputs.capabilities.supports_probabilistic:
        return False, f"speculator {inputs.spec.name} cannot draft probabilistically"
    return True, "draft_sample_method is probabilistic and the speculator can"


def _batch_sharded(inputs: PolicyInputs) -> Answer:
    target = inputs.loaded.target if inputs.loaded is not None else None
    return _batch_sharded_sampling(inputs.config, target)


def _speculator_opts_in(inputs: PolicyInputs) -> Answer:
    name = inputs.spec.name
    if not inputs.capabilities.honors_owner_mask:
        return False, f"speculator {name} does not declare honors_owner_mask"
    if inputs.loaded is None:
        return None, "decided by supports_batch_sharded_draft_logits() of the loaded speculator"
    answer = inputs.loaded.speculator.supports_batch_sharded_draft_logits()
    if not isinstance(answer, bool):
        raise PluginError(
            "a speculator does not say whether it may be sharded",
            where=f"speculator {name!r}, supports_batch_sharded_draft_logits()",
            got=f"{answer!r}; allowed: True or False",
            fix="return a bool",
        )
    if not answer:
        cause = getattr(inputs.loaded.speculator, "opt_out_reason", "")
        reason = f"supports_batch_sharded_draft_logits() of speculator {name} is False"
        return False, f"{reason}: {cause}" if cause else reason
    return True, f"speculator {name} writes through the owner mask"


def _no_draft_watermarker(inputs: PolicyInputs) -> Answer:
    watermarker = inputs.watermarker
    if watermarker is None:
        return True, "no draft watermarker is configured"
    if not watermarker.honors_owner_mask:
        return False, f"draft watermarker {watermarker.name} does not declare honors_owner_mask"
    return True, f"draft watermarker {watermarker.name} honours the owner mask"


def _stock_rejection_sampler(inputs: PolicyInputs) -> Answer:
    declared, loaded = inputs.rejection_sampler, inputs.loaded
    if declared is not None and not declared.accepts_sharded_draft_logits:
        return False, (
            f"rejection sampler {declared.name} does not declare accepts_sharded_draft_logits"
        )
    if loaded is not None and not getattr(
        loaded.rejection_sampler, "accepts_sharded_draft_logits", False
    ):
        kind = type(loaded.rejection_sampler).__name__
        return False, f"rejection sampler {kind} does not declare accepts_sharded_draft_logits"
    if declared is None:
        return True, "the stock rejection sampler reads a sharded cache"
    return True, f"rejection sampler {declared.name} reads a sharded cache"


CORE_RULES = (
    PolicyRule("probabilistic-drafts", _probabilistic_drafts),
    PolicyRule("batch-sharded-sampling", _batch_sharded),
    PolicyRule("speculator-opts-in", _speculator_opts_in),
    PolicyRule("no-draft-watermarker", _no_draft_watermarker),
    PolicyRule("stock-rejection-sampler", _stock_rejection_sampler),
)
