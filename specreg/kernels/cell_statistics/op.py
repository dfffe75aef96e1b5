"""The entry point `cell_statistics`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels.cell_statistics.reference import cell_statistics_reference
from specreg.kernels.common.args import check_cache, check_strides
from specreg.kernels.common.checks import check_tensor
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.common.view import DraftLogitsView

__all__ = ["cell_statistics"]

LAYOUTS = frozenset(DraftLogitsLayout)


def cell_statistics(cache: DraftLogitsView, idx_mapping: Tensor) -> None:
    """Compute the statistics of the requests' bare cells, so that they can be verified.

    Reads the logits of bare cells once; other cells, and requests of other ranks, are not touched.
    Temperature, logsumexp and state of bare cells are written in place: their state becomes
    `CELL_STORED`, or `CELL_EMPTY` where no logit is above -inf. NaN counts as -inf, logits above
    2^100 as 2^100. Does not synchronise with the host on a GPU.

    Args:
        cache: any layout; the temperature of its bare cells is that which their tokens were drawn
            at.
        idx_mapping: int64 `[num_reqs]`, distinct request state indices; -1 is inert.

    Raises:
        TensorError: shapes, dtypes, devices or strides that do not fit; on the host also slots
            without a row.
    """
    device = cache.logits.device
    where = "cell_statistics(idx_mapping)"
    check_tensor(
        where,
        idx_mapping,
        shape=(None,),
        dtypes=(torch.int64,),
        device=device,
        fix="pass the request state index of each request, where the cache is",
    )
    check_strides(where, idx_mapping, idx_mapping.is_contiguous(), "contiguous")
    max_num_seqs = cache.num_rows * cache.shard.num_shards
    check_cache(
        "cell_statistics(cache)",
        cache,
        vocab_size=cache.vocab_size,
        max_num_seqs=max_num_seqs,
        device=device,
        layouts=LAYOUTS,
    )
    if uses_triton(device):
        from specreg.kernels.cell_statistics.kernel import cell_statistics_triton

        cell_statistics_triton(cache, idx_mapping)
        return
    if len(idx_mapping) and int(idx_mapping.max()) >= max_num_seqs:
        raise TensorError(
            "a request has no row",
            where=where,
            got=f"{int(idx_mapping.max())}; allowed: below {max_num_seqs}, or -1 for padding",
            fix="pass slots of the max_num_seqs that the cache was allocated for",
        )
    cell_statistics_reference(cache, idx_mapping)
