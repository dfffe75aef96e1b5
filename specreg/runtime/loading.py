"""What one rank loads and allocates before the first step, in the order that memory asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specreg.batch_sharding import BatchSharder
from specreg.capabilities import FusedSampling, TargetNeeds
from specreg.config import EngineConfig, SpeculativeConfig
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.errors import ConfigError, PluginError, PolicyError, SpecregError
from specreg.memory import GIB
from specreg.nn.hf_decoder import warn_of_unread
from specreg.ownership import Shard
from specreg.policy import (
    DraftLogitsPlan,
    batch_sharded_sampling_enabled,
    finalize,
    resolve,
)
from specreg.registry import Registry, get_registry
from specreg.rejection_sampler import (
    RejectionSampler,
    RejectionSamplerContext,
    VerifyInputs,
    VerifyOutput,
)
from specreg.runtime.kv_budget import KVBudget, scratch_bytes
from specreg.runtime.kv_pool import KVPool, PagedKVView
from specreg.runtime.models import resolve_model
from specreg.runtime.plugin_checks import check_draft_logits
from specreg.runtime.target import Target
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.runtime.token_history import TokenHistory
from specreg.runtime.tokenizer import Tokenizer, eos_token_ids
from specreg.runtime.watermarking import make_watermarker
from specreg.specs import PolicyInputs
from specreg.speculator import Speculator, SpeculatorContext

__all__ = ["Drafting", "LoadedModels", "load_models"]

# Positions of a request when neither the config nor the model's position encoding limits them.
UNLIMITED_MODEL_LEN = 4096

Verify = Callable[[VerifyInputs], VerifyOutput]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafting:
    """The speculator and what it was given.

    Attributes:
        speculator: with weights loaded and bound.
        needs: what it, or the watermarker, reads of the target.
        plan: final plan of the draft-logits cache.
        draft_logits: the cache; None when the plan has none.
        sampler: the door through which it samples.
    """

    speculator: Speculator
    needs: TargetNeeds
    plan: DraftLogitsPlan
    draft_logits: DraftLogitsCache | None
    sampler: DraftSampler


@dataclass(frozen=True)
class LoadedModels:
    """Everything a rank holds for the run.

    Attributes:
        config: of the run.
        tp: the group.
        target: the target model, its head sharded over the vocabulary.
        target_kv: KV of the target's layers.
        kv_pool: of target and draft layers.
        rejection_sampler: verifies.
        sharder: moves logits to their owners; None when every rank verifies everything.
        drafting: None without a speculator.
        max_model_len: positions a request may have.
        tokenizer: of the target; None when it comes without one.
        eos_token_ids: tokens that end a request.
    """

    config: EngineConfig
    tp: TensorParallel
    target: Target
    target_kv: PagedKVView
    kv_pool: KVPool
    rejection_sampler: Verify
    sharder: BatchSharder | None
    drafting: Drafting | None
    max_model_len: int
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]

    @property
    def num_speculative_tokens(self) -> int:
        """K; 0 without a speculator."""
        return self.drafting.plan.num_speculative_tokens if self.drafting is not None else 0

    @property
    def needs(self) -> TargetNeeds:
        """What the speculator reads of the target; nothing without one."""
        return self.drafting.needs if self.drafting is not None else TargetNeeds()

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of this rank's pool, the same on every rank."""
        return self.kv_pool.num_blocks

    @property
    def num_owners(self) -> int:
        """Ranks among which requests are owned."""
        return self.sharder.shard.num_shards if self.sharder is not None else 1


def load_models(
    config: EngineConfig,
    tp: TensorParallel,
    progress: Callable[[str], None] | None = None,
    registry: Registry | None = None,
) -> LoadedModels:
    """Load this rank's part: weights first, then the draft-logits cache, then the KV pool.

    The pool comes last so that what sharding frees becomes KV blocks.

    Args:
        config: of the run.
        tp: the group; every rank calls this at the same time.
        progress: called with a line at the start of each stage.
        registry: what is installed; None takes the process's.

    Raises:
        SpecregError: the configuration, a checkpoint or the policy forbids the run.
    """
    report = progress or (lambda line: None)
    report(f"loading target {config.target}")
    directory = resolve_model(config.target, progress=progress)
    shard = Shard(tp.size, tp.rank)
    target = Target.load(
        directory, dtype=config.dtype, device=tp.device, shard=shard, collectives=tp
    )
    tokenizer = Tokenizer.load(directory)
    max_model_len = _max_model_len(config, target)
    rejection_sampler = make_rejection_sampler(config, target.vocab_size, tp.device, registry)
    drafting = None
    if config.speculative is None and config.draft_logits_sharding == "require":
        raise PolicyError(
            "a sharded draft-logits cache is required, and nothing drafts",
            where="config.draft_logits_sharding",
            got="'require' without a speculative config",
            fix="set speculative_config, or draft_logits_sharding to 'auto'",
        )
    if config.speculative is not None:
        report(f"loading speculator {config.speculative.model or config.speculative.method}")
        drafting = _load_drafting(
            config, config.speculative, target, rejection_sampler, tp, max_model_len, registry
        )
    read = getattr(drafting.speculator, "tensors_of_target", ()) if drafting is not None else ()
    warn_of_unread(directory, sorted(set(target.unread_tensors).difference(read)))
    report("allocating the KV pool")
    kv_pool = _allocate_kv(config, target, drafting, tp, max_model_len)
    target.attach_kv(kv_pool.view(0, is_read_only=True))
    if drafting is not None:
        drafting.speculator.bind(drafting.sampler, kv_pool.view(len(target.kv_specs)))
    is_sharded = batch_sharded_sampling_enabled(config, target)
    return LoadedModels(
        config=config,
        tp=tp,
        target=target,
        target_kv=kv_pool.view(0),
        kv_pool=kv_pool,
        rejection_sampler=rejection_sampler,
        sharder=BatchSharder(shard, tp, target.vocab_size) if is_sharded else None,
        drafting=drafting,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(tokenizer, target.config, target.generation_config),
    )


def _max_model_len(config: EngineConfig, target: Target) -> int:
    """Positions a request may have: as configured, but no more than the target can encode."""
    limit = target.max_model_len
    if config.max_model_len is None:
        return limit or UNLIMITED_MODEL_LEN
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            "requests may not be longer than the target's positions reach",
            where="config.max_model_len",
            got=f"{config.max_model_len}; allowed: at most {limit}, as {config.target} has",
            fix="lower max_model_len, or leave it out to take the target's limit",
        )
    return config.max_model_len


def make_rejection_sampler(
    config: EngineConfig,
    vocab_size: int,
    device: torch.device,
    registry: Registry | None = None,
) -> Verify:
    """The configured rejection sampler: the stock one, or one that a plugin registered.

    Args:
        config: of the run.
        vocab_size: of the target.
        device: of the run.
        registry: what is installed; None takes the process's.

    Raises:
        ConfigError: no plugin registers the configured name.
        PluginError: its factory cannot be imported, or gives something that cannot be called.
    """
    name = config.rejection_sampler
    if name is None:
        speculative = config.speculative
        if speculative is None:
            return RejectionSampler(vocab_size=vocab_size)
        return RejectionSampler(
            speculative.rejection_sample_method,
            vocab_size=vocab_size,
            acceptance_rates=speculative.synthetic_acceptance_rates,
            acceptance_length=speculative.synthetic_acceptance_length,
        )
    factory = (registry or get_registry()).rejection_sampler(name)
    sampler = factory.load_factory()(RejectionSamplerContext(config, vocab_size, device))
    if not callable(sampler):
        raise PluginError(
            f"the factory of rejection sampler {name!r} gives no rejection sampler",
            where=f"{factory.factory}(context)",
            got=f"{type(sampler).__name__}; allowed: a callable from VerifyInputs to VerifyOutput",
            fix="return an object with __call__",
        )
    verify: Verify = sampler
    return verify


def _load_drafting(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    target: Target,
    rejection_sampler: Verify,
    tp: TensorParallel,
    max_model_len: int,
    registry: Registry | None,
) -> Drafting:
    provisional = resolve(config, registry)
    inputs = provisional.inputs
    watermarker = make_watermarker(inputs, target.vocab_size, target.device)
    context = SpeculatorContext(
        spec=inputs.spec,
        config=inputs.config,
        setup=inputs.setup,
        draft_path=_draft_path(config, inputs),
        max_model_len=speculative.max_model_len or max_model_len,
        device=target.device,
        dtype=target.dtype,
        registry=registry,
    )
    speculator = _loaded_speculator(inputs, context, target)
    plan = finalize(
        provisional,
        target,
        speculator,
        rejection_sampler,
        shard_idx=tp.rank,
        all_ranks_agree=tp.all_agree,
    )
    cache = speculator.allocate_draft_logits(plan, target.device)
    check_draft_logits(inputs.spec.name, plan, cache)
    if cache is not None and inputs.capabilities.fused_sampling is not FusedSampling.NONE:
        cache.may_have_bare_cells = True  # before verification is captured in a CUDA graph
    sampler = DraftSampler(
        cache=cache,
        vocab_size=target.vocab_size,
        max_num_seqs=config.max_num_seqs,
        num_speculative_tokens=plan.num_speculative_tokens,
        device=target.device,
        greedy=cache is None,
        target_ids=getattr(speculator, "target_ids", None),
        watermarker=watermarker,
        fused_sampling=inputs.capabilities.fused_sampling,
    )
    needs = inputs.spec.needs_for(inputs.setup)
    if watermarker is not None:
        needs = replace(needs, needs_token_history=True)
    if config.max_num_batched_tokens <= needs.prefill_lookahead:
        raise ConfigError(
            "a step reads too few tokens for this speculator",
            where="config.max_num_batched_tokens",
            got=f"{config.max_num_batched_tokens}; allowed: more than its look-ahead of "
            f"{needs.prefill_lookahead} prompt tokens",
            fix="raise max_num_batched_tokens",
        )
    return Drafting(speculator, needs, plan, cache, sampler)


def _loaded_speculator(
    inputs: PolicyInputs, context: SpeculatorContext, target: Target
) -> Speculator:
    """Made and loaded; what its code raises by mistake is told with the plugin's name."""
    factory = inputs.spec.load_factory()
    try:
        speculator: Speculator = factory(context)
        speculator.load_model(target)
    except (SpecregError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PluginError(
            f"speculator {inputs.spec.name!r} could not be loaded",
            where=f"{inputs.spec.factory} of {inputs.distribution}, called with a context, or its "
            "load_model",
            got=f"{type(error).__name__}: {error}",
            fix="report it to the plugin's authors; the traceback above this error has the line",
        ) from error
    return speculator


def _draft_path(config: EngineConfig, inputs: PolicyInputs) -> str | None:
    """Where the speculator's weights are: a checkpoint of its own, the target's, or nowhere."""
    speculative = config.speculative
    if speculative is not None and speculative.model:
        return str(resolve_model(speculative.model))
    return str(resolve_model(config.target)) if inputs.spec.may_lie_in_target else None


def _allocate_kv(
    config: EngineConfig,
    target: Target,
    drafting: Drafting | None,
    tp: TensorParallel,
    max_model_len: int,
) -> KVPool:
    layers = target.kv_specs
    weights = target.weight_bytes
    cache_bytes = replicated_bytes = num_speculative_tokens = 0
    if drafting is not None:
        plan = drafting.plan
        layers += drafting.needs.kv_specs
        weights += drafting.speculator.weight_bytes()
        if drafting.needs.needs_token_history:
            weights += TokenHistory.num_bytes(config.max_num_seqs, max_model_len)
        cache_bytes = plan.bytes_per_rank + plan.side_bytes_per_rank
        replicated_bytes = plan.replicated_bytes_per_rank
        num_speculative_tokens = plan.num_speculative_tokens
    budget = KVBudget(
        config,
        block_bytes=KVPool.block_bytes(layers, config.block_size, target.dtype),
        max_model_len=max_model_len,
        weight_bytes=weights,
        scratch_bytes=scratch_bytes(config.max_num_seqs, num_speculative_tokens, target.vocab_size),
        device=target.device,
    )
    num_blocks = tp.smallest(budget.num_blocks(cache_bytes))
    if drafting is not None:
        _log_plan(tp, drafting.plan, num_blocks, budget.num_blocks(replicated_bytes))
    return KVPool(
        layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        dtype=target.dtype,
        device=target.device,
    )


def _log_plan(
    tp: TensorParallel, plan: DraftLogitsPlan, num_blocks: int, num_blocks_replicated: int
) -> None:
    """One line a rank: what the cache takes, and why it is not sharded where it is not."""
    failed = [verdict for verdict in plan.verdicts if verdict.passed is False]
    reason = f"; not sharded: {failed[0].rule}: {failed[0].reason}" if failed else ""
    logger.info(
        "rank %d: draft-logits cache of %d rows, layout %s, %.3f GiB (replicated %.3f GiB); "
        "%d KV blocks (%d with the cache replicated)%s",
        tp.rank,
        plan.rows_per_rank,
        plan.layout.value if plan.layout is not None else "none",
        plan.bytes_per_rank / GIB,
        plan.replicated_bytes_per_rank / GIB,
        num_blocks,
        num_blocks_replicated,
        reason,
    )
