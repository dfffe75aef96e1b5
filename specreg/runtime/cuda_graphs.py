"""Which parts of a step are captured as CUDA graphs, for which sizes, and their replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specreg.config import EngineConfig
from specreg.errors import PluginError
from specreg.kernels.common.dispatch import uses_triton

__all__ = ["CapturedFunction", "GraphPool", "GraphSizes"]


@dataclass(frozen=True)
class GraphSizes:
    """The numbers of requests that batches are padded to.

    Padding does not depend on whether anything is captured, and shapes decide the last bits of a
    matrix product: so a run with graphs and one without give the same bits.

    Attributes:
        sizes: ascending; a batch that is larger than all of them is not padded.
        is_captured: whether batches of these sizes run as graphs.
    """

    sizes: tuple[int, ...] = ()
    is_captured: bool = False

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> GraphSizes:
        """What a rank of a run on `device` does: nothing on a CPU, unless told sizes.

        Ranks on GPUs trade by NCCL, whose collectives a graph can hold; every rank replays the same
        graphs in the same order, because the sizes of batches are the same on all.
        """
        can_capture = uses_triton(device)
        sizes = config.cuda_graph_sizes
        if sizes is None:
            sizes = _default_sizes(config.max_num_seqs) if can_capture else ()
        return cls(tuple(sorted(set(sizes))), can_capture and not config.enforce_eager)

    def padded(self, num_reqs: int) -> int:
        """Requests, padding included, of a batch of `num_reqs`."""
        return next((size for size in self.sizes if size >= num_reqs), num_reqs)

    def up_to(self, num_reqs: int) -> GraphSizes:
        """Sizes for batches that never have more than `num_reqs` requests."""
        return replace(self, sizes=tuple(sorted({min(size, num_reqs) for size in self.sizes})))


def _default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
    return (*powers, max_num_seqs)


class GraphPool:
    """What the graphs of a run share: their memory, and what is counted while they are recorded.

    Args:
        handle: of the memory, from `torch.cuda.graph_pool_handle`; None gives each graph its own.
        counters: that captured functions count up, such as the collectives of a group.
    """

    def __init__(self, handle: Any = None, counters: Sequence[Counter[str]] = ()) -> None:
        self.handle = handle
        self._counters = tuple(counters)

    def snapshot(self) -> list[Counter[str]]:
        """The counters' values."""
        return [Counter(counter) for counter in self._counters]

    def rewind(self, before: Sequence[Counter[str]]) -> list[Counter[str]]:
        """Set the counters back to a snapshot; returns what had been counted since."""
        counted = [now - then for now, then in zip(self._counters, before, strict=True)]
        for counter, then in zip(self._counters, before, strict=True):
            counter.clear()
            counter.update(then)
        return counted

    def add(self, counted: Sequence[Counter[str]]) -> None:
        """Count once more what `rewind` gave."""
        for counter, more in zip(self._counters, counted, strict=True):
            counter.update(more)


class _Recording(NamedTuple):
    """A graph, where it leaves its results, and what one run of it adds to the pool's counters."""

    graph: torch.cuda.CUDAGraph
    results: Sequence[Tensor]
    counted: Sequence[Counter[str]]


class CapturedFunction:
    """A function of a batch size whose launches are recorded once a size and then replayed.

    The first call of a size runs the function, then records it; later calls replay what was
    recorded, on what its input buffers hold by then. So nothing runs twice, and whatever is
    compiled, connected or allocated lazily has been when the recording starts.

    Args:
        name: for errors.
        function: of a size; reads and writes tensors of fixed address only, does not synchronise
            with the host, and returns tensors whose shapes follow from the size. It may hold
            collectives if every rank calls it for the same sizes in the same order.
        sizes: recorded when `is_captured`; any other size just runs.
        pool: of the recordings.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[int], Sequence[Tensor]],
        sizes: GraphSizes,
        pool: GraphPool | None = None,
    ) -> None:
        self.name = name
        self._function = function
        self._sizes = sizes
        self._pool = pool or GraphPool()
        self._recordings: dict[int, _Recording] = {}

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Sizes that are recorded by now."""
        return tuple(sorted(self._recordings))

    def __call__(self, size: int) -> list[Tensor]:
        """The function's results, in memory that no later call writes to.

        Raises:
            PluginError: the function does what a CUDA graph cannot hold.
        """
        if not self._sizes.is_captured or size not in self._sizes.sizes:
            return list(self._function(size))
        if size not in self._recordings:
            outputs = list(self._function(size))
            self._recordings[size] = self._record(size)
            return outputs
        recording = self._recordings[size]
        recording.graph.replay()
        self._pool.add(recording.counted)
        return [result.clone() for result in recording.results]

    def release(self) -> None:
        """Drop the recordings: a group whose collectives they hold cannot be left before."""
        for recording in self._recordings.values():
            recording.graph.reset()
        self._recordings.clear()

    def _record(self, size: int) -> _Recording:
        graph = torch.cuda.CUDAGraph()
        before = self._pool.snapshot()
        try:
            # Threads of NCCL and of this package may query the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="thread_local"):
                results = list(self._function(size))
        except RuntimeError as error:
            raise PluginError(
                f"{self.name} cannot be captured as a CUDA graph",
                where=f"{self.name}, {size} requests",
                got=f"{str(error).strip().splitlines()[0]}; allowed: launches on tensors of fixed "
                "address, without host synchronisation or copies from pageable host memory",
                fix="set enforce_eager to true, or declare is_cuda_graph_safe=False in the "
                "speculator's capabilities",
            ) from error
        return _Recording(graph, results, self._pool.rewind(before))
