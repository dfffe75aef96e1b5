"""The scratch of `rejection_sample` on a device does not grow with the batch."""

from dataclasses import replace

import pytest
import torch
from verification_cases import lay_out, random_requests

from specreg.kernels.rejection_sample import prepare
from specreg.kernels.rejection_sample.batch import RejectionBatch


def batch_of(num_reqs, num_drafts=2, vocab_size=600):
    requests = random_requests(num_reqs, vocab_size, num_drafts)
    batch = lay_out(requests, list(range(num_reqs)), num_drafts=num_drafts)
    return RejectionBatch(*batch, vocab_size=vocab_size)


def parts_of(batch, num_residuals):
    parts = []
    prepare.in_parts(batch, parts.append, num_residuals=num_residuals)
    return parts


def scratch_bytes(part):
    tensors = {id(t): t for t in (part.rows.floats, part.rows.ints, part.sums)}
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("num_residuals", [0, 1, 2])
def test_scratch_that_exists_at_a_time_does_not_grow_from_64_to_256_requests(num_residuals):
    few = [scratch_bytes(part) for part in parts_of(batch_of(64), num_residuals)]
    many = [scratch_bytes(part) for part in parts_of(batch_of(256), num_residuals)]
    assert len(few) == 1
    assert max(many) == few[0]
    assert len(many) == 4


@pytest.mark.parametrize("num_reqs", [1, 63, 64, 65, 130])
def test_parts_are_whole_requests_of_equal_size_and_write_where_the_batch_does(num_reqs):
    batch = replace(batch_of(num_reqs), cache=None)
    parts = []
    output = prepare.in_parts(batch, parts.append, num_residuals=0)
    sizes = [part.num_reqs for part in parts]
    assert sum(sizes) == num_reqs
    assert max(sizes) <= prepare.REQUESTS_AT_ONCE
    assert max(sizes) - min(sizes) <= len(sizes)
    start = 0
    for part in parts:
        rows = slice(start, start + part.num_reqs)
        for whole, written in zip(output, part.output, strict=True):
            assert whole[rows].data_ptr() == written.data_ptr()
        assert part.batch.idx_mapping.tolist() == batch.idx_mapping[rows].tolist()
        start += part.num_reqs


def test_an_empty_batch_has_no_parts():
    batch = batch_of(1)
    empty = batch.requests(0, 0)
    assert parts_of(empty, 1) == []


def test_a_real_size_takes_two_megabytes():
    part_of_64 = 64 * 8 * (3 + 485 + 2 + 485) * 4 + 64 * 485 * 4
    assert 2.0e6 < part_of_64 < 2.2e6
    batch = batch_of(2, 7, 3000)
    (part,) = parts_of(batch, 1)
    assert scratch_bytes(part) == 2 * 8 * (3 + 6 + 2 + 6) * 4 + 2 * 6 * 4
    assert part.rows.floats.dtype == torch.float32
