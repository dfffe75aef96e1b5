"""The entry point `rejection_sample`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels.common.args import check_cache, check_strides
from specreg.kernels.common.checks import FLOATS, INDICES, check_tensor
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.block.reference import block_sample_reference
from specreg.kernels.rejection_sample.reference import rejection_sample_reference
from specreg.kernels.rejection_sample.synthetic.reference import synthetic_sample_reference

__all__ = ["METHODS", "rejection_sample"]


LAYOUTS = frozenset(DraftLogitsLayout)  # that every method reads


class Method(NamedTuple):
    """How drafts are judged.

    Attributes:
        reference: the torch twin.
        kernel: its launcher, `"module:function"` below this package; imported where Triton runs.
        takes_rates: whether it accepts at given rates.
    """

    reference: Callable[[RejectionBatch], RejectionOutput]
    kernel: str
    takes_rates: bool = False

    def verify(self, batch: RejectionBatch) -> RejectionOutput:
        """Verify a checked batch where it lies."""
        if not uses_triton(batch.target_logits.device):
            return self.reference(batch)
        module, _, name = self.kernel.partition(":")
        launcher = getattr(import_module(f"specreg.kernels.rejection_sample.{module}"), name)
        return cast(RejectionOutput, launcher(batch))


METHODS = {
    "standard": Method(rejection_sample_reference, "kernel:rejection_sample_triton"),
    "block": Method(block_sample_reference, "block.kernel:block_sample_triton"),
    "synthetic": Method(
        synthetic_sample_reference, "synthetic.kernel:synthetic_sample_triton", takes_rates=True
    ),
}


def rejection_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    idx_mapping: Tensor,
    cu_num_logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    method: str = "standard",
    acceptance_rates: Tensor | None = None,
) -> RejectionOutput:
    """Verify draft tokens: keep a prefix of them and draw one more token, so that what is emitted
    follows the target distribution exactly.

    Methods, each on the page of its package: `standard` judges drafts one by one
    (`specreg.kernels.rejection_sample`), `block` a round's drafts together, which keeps more of
    them (`...block`), and `synthetic` accepts at given rates and is not exact: it is for benchmarks
    (`...synthetic`).

    Row `i` of a request decides the token at `positions + i` and judges draft `i`; the last of its
    rows judges none. Without drafts the token is a plain draw from the target.

    - Temperature 0: a draft is kept if it equals the argmax (lowest id on ties); the token is the
      argmax.
    - A draft of -1, or at or beyond `vocab_size`, is rejected and the token drawn from the target.
      So is one whose cache cell is not stored for this proposal (cleared, owned by another rank, or
      bare: `cell_statistics` is to be called before), or gives the
      draft probability 0.
    - Without a cache, or where the cell's temperature is 0, drafts are taken as argmaxes.
    - NaN counts as -inf, logits above 2^100 as 2^100. A row without a logit above -inf gives
      token 0. Both are counted in `num_nans`. No other token of probability 0 is ever emitted, and
      none at or beyond `vocab_size`.

    Does not synchronise with the host on a GPU. Tokens depend on a request's own logits,
    temperature, seed, positions and drafts, bit for bit; not on slot, batch row or batch size.

    Args:
        target_logits: `[num_logits, >= vocab_size]`, fp32, bf16 or fp16, before temperature, rows
            contiguous. Rows behind `cu_num_logits[-1]` are not read.
        draft_tokens: int64 `[num_reqs, num_speculative_tokens]`, -1 where there is none.
        idx_mapping: int64 `[num_reqs]`, request state indices; -1 marks a padding row.
        cu_num_logits: int32 or int64 `[num_reqs + 1]`, offsets of the requests' logits rows: 1 and
            a row a draft, or none in mid-prefill. Rows of a request beyond
            `num_speculative_tokens + 1` are ignored.
        positions: int64 `[num_reqs]`, position of the first token decided, below 2^31.
        temperature: fp32 `[max_num_seqs]` by slot; applied to the target only.
        seeds: int64 `[max_num_seqs]` by slot.
        cache: the draft logits that this rank keeps; read only.
        vocab_size: columns of the target's vocabulary.
        method: how drafts are judged: `"standard"`, `"block"` or `"synthetic"`.
        acceptance_rates: fp32 `[num_speculative_tokens]` of `synthetic`, which needs them, and no
            other: the probability that the drafts 0 .. i are all accepted; does not increase.

    Returns:
        `RejectionOutput(sampled, num_sampled, num_nans)`, newly allocated.

    Raises:
        TensorError: shapes, dtypes, devices or strides that do not fit, or an unknown method; on
            the host also slots and offsets of logits rows that are out of range or order.
    """
    if method not in METHODS:
        raise TensorError(
            "the rejection sampling method is not known",
            where="rejection_sample(method)",
            got=f"{method!r}; allowed: {', '.join(sorted(METHODS))}",
            fix="pass one of the allowed methods",
        )
    batch = RejectionBatch(
        target_logits=target_logits,
        draft_tokens=draft_tokens,
        idx_mapping=idx_mapping,
        cu_num_logits=cu_num_logits,
        positions=positions,
        temperature=temperature,
        seeds=seeds,
        cache=cache,
        vocab_size=vocab_size,
        acceptance_rates=acceptance_rates,
    )
    _check(batch)
    _check_rates(batch, method)
    return METHODS[method].verify(batch)


_INT64, _FP32 = (torch.int64,), (torch.float32,)
_FIXES = {
    "idx_mapping": "pass the request state index of each request, where the logits are",
    "cu_num_logits": "pass an offset a request and the total, where the logits are",
    "positions": "pass one position a request, where the logits are",
    "seeds": "pass one seed a slot, where the logits are",
    "temperature": "pass one temperature a slot, where the logits are",
}


def _check(batch: RejectionBatch) -> None:
    _check_logits(batch)
    device, num_reqs = batch.target_logits.device, batch.num_reqs
    check_tensor(
        "rejection_sample(draft_tokens)",
        batch.draft_tokens,
        shape=(num_reqs, None),
        dtypes=(torch.int64,),
        device=device,
        fix="pass num_speculative_tokens ids a request, -1 where there is no draft",
    )
    num_drafts = batch.draft_tokens.shape[1]
    is_packed = num_drafts <= 1 or batch.draft_tokens.stride(1) == 1
    check_strides(
        "rejection_sample(draft_tokens)", batch.draft_tokens, is_packed, "stride 1 in a row"
    )
    max_num_seqs = batch.seeds.numel()
    for name, where, length, dtypes in (
        ("idx_mapping", "rejection_sample(idx_mapping)", None, _INT64),
        ("cu_num_logits", "rejection_sample(cu_num_logits)", num_reqs + 1, INDICES),
        ("positions", "rejection_sample(positions)", num_reqs, _INT64),
        ("seeds", "rejection_sample(seeds)", max_num_seqs, _INT64),
        ("temperature", "rejection_sample(temperature)", max_num_seqs, _FP32),
    ):
        tensor: Tensor = getattr(batch, name)
        check_tensor(where, tensor, shape=(length,), dtypes=dtypes, device=device, fix=_FIXES[name])
        check_strides(where, tensor, tensor.is_contiguous(), "contiguous")
    if batch.cache is not None:
        check_cache(
            "rejection_sample(cache)",
            batch.cache,
            vocab_size=batch.vocab_size,
            max_num_seqs=max_num_seqs,
            device=device,
            layouts=LAYOUTS,
        )
        if batch.cache.num_speculative_tokens < num_drafts:
            raise TensorError(
                "the draft-logits cache has no cell for some drafts",
                where="rejection_sample(cache, draft_tokens)",
                got=f"{batch.cache.num_speculative_tokens} steps for {num_drafts} drafts a request",
                fix="pass at most as many drafts as the cache was allocated for",
            )
    if device.type == "cpu":
        _check_values(batch)


def _check_rates(batch: RejectionBatch, method: str) -> None:
    rates = batch.acceptance_rates
    if (rates is not None) != METHODS[method].takes_rates:
        raise TensorError(
            "acceptance rates go with synthetic acceptance",
            where="rejection_sample(method, acceptance_rates)",
            got=f"{'None' if rates is None else 'rates'} with method {method!r}; allowed: rates "
            "with 'synthetic', and with it alone",
            fix="pass both or neither",
        )
    if rates is not None:
        where = "rejection_sample(acceptance_rates)"
        check_tensor(
            where,
            rates,
            shape=(batch.draft_tokens.shape[1],),
            dtypes=(torch.float32,),
            device=batch.target_logits.device,
            fix="pass one rate a draft, where the logits are",
        )
        check_strides(where, rates, rates.is_contiguous(), "contiguous")


def _check_logits(batch: RejectionBatch) -> None:
    logits = batch.target_logits
    check_tensor(
        "rejection_sample(target_logits)",
        logits,
        shape=(None, None),
        dtypes=FLOATS,
        device=logits.device,
        fix="pass one row of floating-point logits a token to be decided",
    )
    width = logits.shape[1]
    if not 1 <= batch.vocab_size <= width:
        raise TensorError(
            "the target logits do not span the vocabulary",
            where="rejection_sample(target_logits, vocab_size)",
            got=f"{width} columns; allowed: vocab_size={batch.vocab_size} or more, and at least 1",
            fix="gather the whole vocabulary before verifying",
        )
    is_packed = width == 1 or logits.stride(1) == 1
    check_strides("rejection_sample(target_logits)", logits, is_packed, "stride 1 between columns")


def _check_values(batch: RejectionBatch) -> None:
    """What costs a host synchronisation elsewhere."""
    cu_num_logits, num_logits = batch.cu_num_logits, batch.target_logits.shape[0]
    max_num_seqs = batch.seeds.numel()
    if batch.num_reqs and int(batch.idx_mapping.max()) >= max_num_seqs:
        raise TensorError(
            "a request has no slot",
            where="rejection_sample(idx_mapping)",
            got=f"{int(batch.idx_mapping.max())}; allowed: below {max_num_seqs}, or -1 for padding",
            fix="pass temperature and seeds of max_num_seqs slots",
        )
    first, last = int(cu_num_logits[0]), int(cu_num_logits[-1])
    if first < 0 or last > num_logits or bool((cu_num_logits.diff() < 0).any()):
        raise TensorError(
            "the offsets of logits rows are out of order",
            where="rejection_sample(cu_num_logits)",
            got=f"{cu_num_logits.tolist()} for {num_logits} logits rows; allowed: never "
            f"decreasing, within 0 .. {num_logits}",
            fix="pass the cumulative number of logits rows of the requests",
        )
