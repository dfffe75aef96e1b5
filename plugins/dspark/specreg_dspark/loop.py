"""The steps of a proposal in torch: bias, add, sample. The reference of fused samplers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from specreg_dflash.candidates.best_columns import top_candidates
from torch import Tensor

from specreg.draft_sampler import DraftSampler
from specreg_dspark.declarations import MAX_CANDIDATES
from specreg_dspark.dspark_config import DSparkConfig
from specreg_dspark.markov_head import MarkovHead

__all__ = ["Draw", "all_columns", "best_columns", "shaped", "walk"]

Draw = Callable[[int, Tensor], Tensor]
"""`(step, features [num_reqs, rank])` to the tokens of the step, int64 `[num_reqs]` target ids."""


def walk(head: MarkovHead, hidden: Tensor, anchors: Tensor, draw: Draw) -> Tensor:
    """Draw a proposal step by step, each draft behind the one before.

    Args:
        head: the Markov head.
        hidden: `[num_reqs, num_steps, hidden_size]`, the drafts' rows.
        anchors: int64 `[num_reqs]`, target ids of the tokens before the first draft.
        draw: scores a step and draws from it.

    Returns:
        int64 `[num_reqs, num_steps]`, what `draw` returned.
    """
    previous, state = anchors, head.begin(len(anchors))
    drafts = []
    for step in range(hidden.shape[1]):
        features, state = head(head.embed(previous), hidden[:, step], state)
        previous = draw(step, features)
        drafts.append(previous)
    return torch.stack(drafts, dim=1)


def shaped(logits: Tensor, config: DSparkConfig) -> Tensor:
    """Soft cap and scale of the config, rounded once; base logits and bias each go through it.

    Args:
        logits: `[..., num_columns]`, of any float dtype; not written, returned where nothing
            changes.
        config: of the drafter.

    Returns:
        The shape and dtype of `logits`.
    """
    scale, cap = config.backbone.logit_scale, config.soft_cap
    if cap is None:
        return logits if scale == 1.0 else logits * scale
    return (cap * torch.tanh(logits.float() / cap) * scale).to(logits.dtype)


def all_columns(
    sampler: DraftSampler, head: MarkovHead, config: DSparkConfig, base: Tensor, positions: Tensor
) -> Draw:
    """Draw from all columns: base logits and bias, their sum rounded to the logits' dtype.

    Args:
        sampler: draws and stores.
        head: the Markov head.
        config: of the drafter.
        base: `[num_reqs, num_steps, draft_vocab_size]`, shaped.
        positions: int64 `[num_reqs, num_steps]`, where the drafts stand.
    """
    by_step = positions.T.contiguous()

    def draw(step: int, features: Tensor) -> Tensor:
        bias = shaped(head.bias(features), config).to(base.dtype)
        return sampler.sample(base[:, step] + bias, step, by_step[step])

    return draw


def best_columns(
    sampler: DraftSampler,
    head: MarkovHead,
    config: DSparkConfig,
    base: Tensor,
    positions: Tensor,
    num_candidates: int,
    target_ids: Tensor | None,
) -> Draw:
    """Draw from the columns that score highest before any bias; only their rows of W2 are read.

    Args:
        sampler, head, config, base, positions: as of `all_columns`.
        num_candidates: columns a step.
        target_ids: int64 `[draft_vocab_size]`, of each column; None where they are the same.
    """
    num_columns = config.backbone.draft_vocab_size
    columns, best = top_candidates(base, num_candidates, num_columns)
    best = best.to(base.dtype)
    ids = columns if target_ids is None else target_ids[columns]
    by_step = positions.T.contiguous()

    def draw(step: int, features: Tensor) -> Tensor:
        at = columns[:, step]
        scores = best[:, step] + shaped(head.bias_of(features, at), config).to(base.dtype)
        if num_candidates <= MAX_CANDIDATES:
            return sampler.sample_candidates(ids[:, step], scores.float(), step, by_step[step])
        row = base.new_full((len(at), num_columns), -torch.inf).scatter(1, at, scores)
        return sampler.sample(row, step, by_step[step])

    return draw
