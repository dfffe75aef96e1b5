"""What a fused sampler gets of one proposal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specreg.draft_logits import DraftLogitsView
from specreg.draft_sampler import LentSampling

__all__ = ["MarkovInputs"]


@dataclass(frozen=True)
class MarkovInputs:
    """One proposal of a batch: K steps, each of which the token before biases.

    With base logits x_1 .. x_K and anchor token y_0 of a request, step k draws from

        z_k = round(x_k + round(scale * cap(round(W2 W1[y_{k-1}]))))

    as `specreg.kernels.markov_sample` spells out. Noise is that of `specreg.kernels.draft_sample`
    for (seed, position, step), so that tokens are those of the loop.

    A sampler returns True when all of `tokens` is written, -1 for rows without a request, and,
    where there is a cache, the logits that were drawn from (rounded as they are stored) are in the
    cells of every step of every request that it stores; nothing else may have changed. It returns
    False when it has changed nothing at all, and then the loop runs. The answer is the same on all
    ranks and depends on shapes, dtypes and the layout alone, never on values: it is taken when a
    CUDA graph is captured and holds for every replay. No host synchronisation. Scratch is the
    sampler's own.

    Attributes:
        base_logits: `[num_reqs, K, width]` with width at least the draft columns, fp32, bf16 or
            fp16, the last dimension contiguous, scale and cap applied. Not to be changed.
        anchors: int64 `[num_reqs]`, target id of the token before the first draft.
        positions: int64 `[num_reqs]`, position of the first draft; the others follow it.
        idx_mapping: int64 `[num_reqs]`, request state index; -1 marks a row without a request:
            nothing is read or stored for it. A graph is replayed with fewer live rows.
        w1: `[num_ids, rank]`, the Markov embedding, by target id.
        w2: `[num_rows, rank]`, the Markov projection, by draft column.
        scale, soft_cap: of the bias; 1.0 and None change nothing.
        temperature: fp32 `[max_num_seqs]` by slot; exactly 0 means argmax.
        seeds: int64 `[max_num_seqs]` by slot.
        cache: where logits go; None stores nothing. Its `shard` says whose rows these are.
        vocab_size: columns of the target's vocabulary.
        target_ids: int64 `[num_draft_columns]`, target id of each draft column; None where they are
            the same.
        greedy: take the argmax whatever the temperature; then there is no cache.
        num_nans: int32 `[max_num_seqs]` by slot, raised by one a step with a NaN or without a logit
            above -inf; None does not count.
        tokens: int64 `[num_reqs, K]`, written in place: target ids.
    """

    base_logits: Tensor
    anchors: Tensor
    positions: Tensor
    idx_mapping: Tensor
    w1: Tensor
    w2: Tensor
    scale: float
    soft_cap: float | None
    temperature: Tensor
    seeds: Tensor
    cache: DraftLogitsView | None
    vocab_size: int
    target_ids: Tensor | None
    greedy: bool
    num_nans: Tensor | None
    tokens: Tensor

    @classmethod
    def of(
        cls,
        lent: LentSampling,
        *,
        base_logits: Tensor,
        anchors: Tensor,
        positions: Tensor,
        w1: Tensor,
        w2: Tensor,
        scale: float,
        soft_cap: float | None,
    ) -> MarkovInputs:
        """The proposal of a batch, with what the `DraftSampler` lends, and new `tokens`."""
        return cls(
            base_logits=base_logits,
            anchors=anchors,
            positions=positions,
            idx_mapping=lent.slots,
            w1=w1,
            w2=w2,
            scale=scale,
            soft_cap=soft_cap,
            temperature=lent.temperature,
            seeds=lent.seeds,
            cache=lent.cache,
            vocab_size=lent.vocab_size,
            target_ids=lent.target_ids,
            greedy=lent.greedy,
            num_nans=lent.num_nans,
            tokens=anchors.new_empty(base_logits.shape[:2]),
        )
