"""`cell_statistics` in the interpreter against its twin."""

from dataclasses import replace

import pytest
import torch
from cache_layouts import batch_of_candidates, in_larger_buffers, in_layout
from verification_cases import random_requests

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.cell_statistics import kernel
from specreg.kernels.cell_statistics.reference import cell_statistics_reference
from specreg.kernels.common.view import CELL_BARE, CELL_EMPTY
from specreg.ownership import Shard


def bare_copy(view):
    return replace(
        view,
        logsumexp=torch.full_like(view.logsumexp, float("nan")),
        state=torch.full_like(view.state, CELL_BARE),
        temperature=view.temperature.clone(),
    )


@pytest.mark.parametrize("in_buffers", [False, True])
@pytest.mark.parametrize("layout", list(DraftLogitsLayout))
def test_kernel_and_twin_agree(layout, in_buffers, monkeypatch):
    monkeypatch.setattr(kernel, "REQUESTS_AT_ONCE", 3)
    requests = random_requests(4, 1100, dtype=torch.bfloat16)
    batch, columns = batch_of_candidates(requests, [9, 1, 5, 3], shard=Shard(2, 1))
    view = in_layout(batch.cache, columns, layout)
    view.logits[0, 0] = float("nan")
    view.logits[0, 1, 3] = float("inf")
    if in_buffers:
        view = in_larger_buffers(view)
    got, expected = bare_copy(view), bare_copy(view)
    for cache in (got, expected):
        cache.state[1, 0] = CELL_EMPTY
        cache.temperature[2, 1] = 1e-30
    idx_mapping = torch.tensor([9, -1, 1, 4, 5])
    kernel.cell_statistics_triton(got, idx_mapping)
    cell_statistics_reference(expected, idx_mapping)
    assert torch.equal(got.state, expected.state)
    assert torch.equal(got.temperature, expected.temperature)
    assert torch.allclose(got.logsumexp, expected.logsumexp, rtol=1e-6, equal_nan=True)
    assert CELL_EMPTY in got.state
    assert CELL_BARE in got.state
