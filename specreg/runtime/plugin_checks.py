"""What a speculator hands back, held against its contract before anything is built on it."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.draft_logits import DraftLogitsCache
from specreg.errors import PluginError
from specreg.plan import DraftLogitsPlan
from specreg.speculator import DraftOutput

__all__ = ["check_draft_ids", "check_draft_logits", "checked_tokens"]


def check_draft_logits(
    speculator: str, plan: DraftLogitsPlan, cache: DraftLogitsCache | None
) -> None:
    """Refuse a cache that is not the planned one. Raises `PluginError`."""
    planned = (plan.num_shards, plan.shape, plan.bytes_per_rank) if plan.has_cache else None
    got = None
    if isinstance(cache, DraftLogitsCache):
        got = (cache.num_shards, tuple(cache.logits.shape), cache.nbytes)
    if got != planned or (cache is not None and got is None):
        raise PluginError(
            "the speculator allocated another draft-logits cache than was planned",
            where=f"speculator {speculator!r}, allocate_draft_logits",
            got=f"(shards, shape, bytes) {got}; allowed: {planned}",
            fix="return DraftLogitsCache.allocate(plan, device), as SpeculatorBase does",
        )


def checked_tokens(
    speculator: str, output: object, num_reqs: int, num_speculative_tokens: int
) -> Tensor:
    """The proposal's token matrix. No host synchronisation. Raises `PluginError`."""
    tokens = output.tokens if isinstance(output, DraftOutput) else None
    shape = (num_reqs, num_speculative_tokens)
    if (
        not isinstance(tokens, Tensor)
        or tokens.dtype != torch.int64
        or tuple(tokens.shape) != shape
    ):
        got = type(output if tokens is None else tokens).__name__
        if isinstance(tokens, Tensor):
            got = f"{tokens.dtype} {list(tokens.shape)}"
        raise PluginError(
            "the speculator proposed something else than draft tokens",
            where=f"speculator {speculator!r}, propose",
            got=f"{got}; allowed: DraftOutput with tokens int64 {list(shape)}",
            fix="return DraftOutput(tokens), -1 where there is no draft",
        )
    return tokens


def check_draft_ids(speculator: str, drafts: list[list[int]], vocab_size: int) -> None:
    """Refuse proposals, on the host, with ids outside the vocabulary. Raises `PluginError`."""
    wrong = sorted({token for row in drafts for token in row if not -1 <= token < vocab_size})
    if wrong:
        raise PluginError(
            "the speculator proposed tokens that do not exist",
            where=f"speculator {speculator!r}, propose",
            got=f"ids {wrong[:5]}; allowed: -1 (no draft) and 0..{vocab_size - 1}",
            fix="return what DraftSampler gave, in the target's vocabulary",
        )
