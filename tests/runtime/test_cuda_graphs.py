"""What batches are padded to, and functions that are captured only where something captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specreg.config import EngineConfig
from specreg.runtime import cuda_graphs
from specreg.runtime.cuda_graphs import CapturedFunction, GraphPool, GraphSizes

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


def test_ranks_on_gpus_get_the_graphs_of_one() -> None:
    assert sizes_of(tensor_parallel_size=2) == sizes_of()
    assert sizes_of(CPU, tensor_parallel_size=2) == GraphSizes()


def test_a_rank_that_owns_fewer_requests_than_there_are_gets_no_larger_sizes() -> None:
    sizes = GraphSizes((1, 2, 4, 6), is_captured=True)
    assert sizes.up_to(3) == GraphSizes((1, 2, 3), is_captured=True)
    assert sizes.up_to(6) == sizes
    assert GraphSizes((4, 6)).up_to(2) == GraphSizes((2,))


def test_eager_runs_pad_alike_so_that_their_bits_are_the_same() -> None:
    assert sizes_of(enforce_eager=True) == GraphSizes((1, 2, 4, 6), is_captured=False)


def test_nothing_is_padded_on_a_cpu_unless_sizes_are_given() -> None:
    assert sizes_of(CPU) == GraphSizes()
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


class RecordedGraph:
    """A graph without a device: replays are counted, and launch nothing."""

    alive: list[RecordedGraph]

    def __init__(self) -> None:
        self.num_replays = 0
        self.alive.append(self)

    def replay(self) -> None:
        self.num_replays += 1

    def reset(self) -> None:
        self.alive.remove(self)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """The graphs that are alive, in the order of their recording."""

    @contextmanager
    def recording(graph: RecordedGraph, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"  # watchdogs query meanwhile
        yield

    RecordedGraph.alive = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return RecordedGraph.alive


def test_a_replay_counts_the_collectives_that_it_holds_and_a_recording_counts_none(
    graphs: list[RecordedGraph],
) -> None:
    counts: Counter[str] = Counter(broadcast=7)
    num_bytes: Counter[str] = Counter()

    def gather_and_draft(size: int) -> list[torch.Tensor]:
        counts["all_gather"] += 2
        num_bytes["all_gather"] += 100 * size
        return [torch.ones(size)]

    sizes = GraphSizes((1, 4), is_captured=True)
    draft = CapturedFunction("draft", gather_and_draft, sizes, GraphPool(None, (counts, num_bytes)))
    for number, size in enumerate([4, 4, 1, 3, 4], start=1):
        assert len(draft(size)[0]) == size
        assert counts == {"broadcast": 7, "all_gather": 2 * number}
    assert num_bytes == {"all_gather": 1600}
    assert [graph.num_replays for graph in graphs] == [2, 0]
    counts.clear()  # as every run does
    draft(1)
    assert counts == {"all_gather": 2}


def test_released_functions_hold_no_graph(graphs: list[RecordedGraph]) -> None:
    double = CapturedFunction("double", lambda n: [torch.ones(n)], GraphSizes((2, 4), True))
    double(2), double(4)
    assert len(graphs) == 2
    double.release()
    double.release()
    assert graphs == []
    assert double.captured_sizes == ()
