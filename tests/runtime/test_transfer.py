"""Numbers between host and device in one copy."""

from __future__ import annotations

import torch

from specreg.runtime.transfer import to_device, to_host

CPU = torch.device("cpu")


def test_lists_become_tensors_that_begin_at_multiples_of_16_bytes() -> None:
    lists = [[1, 2, 3], [], [4], [-(2**62)], []]
    tensors = to_device(lists, CPU)
    assert [tensor.tolist() for tensor in tensors] == lists
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    assert all(tensor.storage_offset() % 2 == 0 for tensor in tensors)


def test_tensors_come_to_the_host_with_their_shapes() -> None:
    tensors = [torch.arange(6).view(2, 3).T, torch.tensor(7), torch.zeros(4, 0, dtype=torch.int64)]
    parts = to_host(tensors)
    assert all(map(torch.equal, parts, tensors))
