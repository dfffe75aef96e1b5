"""Every method and layout of `rejection_sample` in the interpreter against its twin."""

from dataclasses import replace

import pytest
import torch
from cache_layouts import batch_of_candidates, in_larger_buffers, in_layout
from verification_cases import (
    lay_out,
    make_cache,
    random_requests,
    with_cell,
    with_draft,
    with_target,
)

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.view import CELL_EMPTY
from specreg.kernels.rejection_sample import kernel, prepare, reference
from specreg.kernels.rejection_sample.batch import RejectionBatch
from specreg.kernels.rejection_sample.block import kernel as block_kernel
from specreg.kernels.rejection_sample.block.reference import block_sample_reference
from specreg.kernels.rejection_sample.synthetic import kernel as synthetic_kernel
from specreg.kernels.rejection_sample.synthetic.reference import synthetic_sample_reference
from specreg.ownership import Shard

METHODS = {
    "standard": (kernel.rejection_sample_triton, reference.rejection_sample_reference),
    "block": (block_kernel.block_sample_triton, block_sample_reference),
    "synthetic": (synthetic_kernel.synthetic_sample_triton, synthetic_sample_reference),
}
OTHERS = ["block", "synthetic"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def agree(batch, vocab_size, method):
    """Run kernel and twin and compare every output."""
    rates = torch.tensor([0.9, 0.6, 0.4])[: batch.draft_tokens.shape[1]]
    checked = RejectionBatch(
        *batch, vocab_size=vocab_size, acceptance_rates=rates if method == "synthetic" else None
    )
    run, twin = METHODS[method]
    output = run(checked)
    for got, expected in zip(output, twin(checked), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    return output


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("layout", list(DraftLogitsLayout))
def test_every_layout_agrees_in_any_storage(layout, method):
    requests = random_requests(5, 600, closeness=0.3, seed=8)
    batch, columns = batch_of_candidates(requests, [9, 1, 5, 3, 7], shard=Shard(2, 1))
    view = in_layout(batch.cache, columns, layout)
    output = agree(batch._replace(cache=view), 600, method)
    again = agree(batch._replace(cache=in_larger_buffers(view)), 600, method)
    assert all(torch.equal(a, b) for a, b in zip(output, again, strict=True))
    assert len(set(output.num_sampled.tolist())) > 1


@pytest.mark.parametrize("layout", list(DraftLogitsLayout))
def test_one_candidate_and_one_column_agree(layout):
    requests = random_requests(4, 40)
    batch, columns = batch_of_candidates(requests, [0, 1, 2, 3], num_candidates=1)
    view = in_layout(batch.cache, columns, layout)
    for method in ("standard", "block"):
        agree(batch._replace(cache=view), 40, method)


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 513])
def test_mixed_batches_agree(vocab_size, with_cache, method):
    """Greedy and sampled requests, one without drafts, one in mid-prefill, one padding row."""
    requests = random_requests(6, vocab_size)
    requests[2] = replace(requests[2], target=requests[2].target[:1])
    requests[4] = replace(requests[4], target=requests[4].target[:0])
    batch = lay_out([*requests, None], [3, 0, 5, 1, 2, 4, -1], with_cache=with_cache)
    output = agree(batch, vocab_size, method)
    assert output.num_sampled[[4, 6]].tolist() == [0, 0]


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_rounds_of_any_length_agree(num_drafts, method):
    requests = random_requests(4, 700, num_drafts, closeness=0.2)
    agree(lay_out(requests, [2, 0, 1, 3], num_drafts=num_drafts), 700, method)


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("with_cache", [True, False])
def test_drafts_without_a_distribution_agree(with_cache, method):
    requests = random_requests(6, 300, closeness=0.1)
    batch = lay_out(requests, list(range(6)), with_cache=with_cache)
    batch = with_draft(with_draft(batch, 0, 0, -1), 1, 2, 300)
    if with_cache:
        view = with_cell(batch.cache, 2, 1, state=CELL_EMPTY)
        view = with_cell(view, 4, 0, temperature=0.0)
        view = with_cell(view, 5, 1, temperature=0.0)
        batch = batch._replace(cache=view)
    agree(batch, 300, method)
    if with_cache:
        foreign = make_cache(12, 3, 300, shard=Shard(2, 1))
        agree(batch._replace(cache=foreign), 300, method)


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_agree(value, method):
    batch = lay_out(random_requests(4, 600), [0, 1, 2, 3])
    row = batch.target_logits[4].clone()
    row[[3, 599]] = value
    batch = with_target(with_target(batch, 4, row), 8, torch.full((600,), value))
    agree(batch, 600, method)
    cell = batch.cache.logits.clone()
    cell[1, 0, :300] = value
    agree(batch._replace(cache=replace(batch.cache, logits=cell)), 600, method)


@pytest.mark.parametrize("method", list(METHODS))
def test_parts_of_a_batch_agree_with_the_whole(method, monkeypatch):
    batch = lay_out(random_requests(5, 600), list(range(5)))
    whole = agree(batch, 600, method)
    for most in (1, 2):
        monkeypatch.setattr(prepare, "REQUESTS_AT_ONCE", most)
        parts = agree(batch, 600, method)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
