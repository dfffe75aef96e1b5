"""What batches are padded to, and functions that are captured only where something captures."""

from __future__ import annotations

import pytest
import torch

from specreg.config import EngineConfig
from specreg.runtime import cuda_graphs
from specreg.runtime.cuda_graphs import CapturedFunction, GraphSizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def sizes_of(device: torch.device = CUDA, **config: object) -> GraphSizes:
    return GraphSizes.of(EngineConfig.parse({"max_num_seqs": 6, **config}), device)


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "uses_triton", lambda device: device.type == "cuda")


def test_a_gpu_gets_graphs_for_powers_of_two_and_for_the_most_requests() -> None:
    assert sizes_of() == GraphSizes((1, 2, 4, 6), is_captured=True)
    assert sizes_of(max_num_seqs=8).sizes == (1, 2, 4, 8)
    assert sizes_of(max_num_seqs=1).sizes == (1,)


def test_eager_runs_pad_alike_so_that_their_bits_are_the_same() -> None:
    assert sizes_of(enforce_eager=True) == GraphSizes((1, 2, 4, 6), is_captured=False)


def test_nothing_is_padded_on_a_cpu_or_with_several_ranks_unless_sizes_are_given() -> None:
    assert sizes_of(CPU) == GraphSizes()
    assert sizes_of(tensor_parallel_size=2) == GraphSizes()
    assert sizes_of(CPU, cuda_graph_sizes=[4, 2, 4]) == GraphSizes((2, 4), is_captured=False)
    assert sizes_of(cuda_graph_sizes=[]) == GraphSizes((), is_captured=True)


def test_a_batch_is_padded_to_the_next_size_and_not_beyond_the_last() -> None:
    sizes = GraphSizes((2, 4))
    assert [sizes.padded(count) for count in range(1, 7)] == [2, 2, 4, 4, 5, 6]


def test_a_function_just_runs_where_nothing_is_captured() -> None:
    calls: list[int] = []

    def ones(size: int) -> list[torch.Tensor]:
        calls.append(size)
        return [torch.ones(size)]

    captured = CapturedFunction("ones", ones, GraphSizes((2,), is_captured=False))
    assert [len(captured(size)[0]) for size in (2, 2, 3)] == [2, 2, 3]
    assert calls == [2, 2, 3]
    assert captured.captured_sizes == ()
