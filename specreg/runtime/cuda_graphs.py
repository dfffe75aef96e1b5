"""Which parts of a step are captured as CUDA graphs, for which sizes, and their replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specreg.config import EngineConfig
from specreg.errors import PluginError
from specreg.kernels.common.dispatch import uses_triton

__all__ = ["CapturedFunction", "GraphSizes"]


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
        """What a run on `device` does: nothing on a CPU, or with several ranks, unless told sizes.

        With several ranks drafting and verification hold collectives, which run eagerly.
        """
        can_capture = uses_triton(device) and config.tensor_parallel_size == 1
        sizes = config.cuda_graph_sizes
        if sizes is None:
            sizes = _default_sizes(config.max_num_seqs) if can_capture else ()
        return cls(tuple(sorted(set(sizes))), can_capture and not config.enforce_eager)

    def padded(self, num_reqs: int) -> int:
        """Requests, padding included, of a batch of `num_reqs`."""
        return next((size for size in self.sizes if size >= num_reqs), num_reqs)


def _default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
    return (*powers, max_num_seqs)


class CapturedFunction:
    """A function of a batch size whose launches are recorded once a size and then replayed.

    The first call of a size runs the function, then records it; later calls replay what was
    recorded, on what its input buffers hold by then. So nothing runs twice, and whatever is
    compiled or allocated lazily has been when the recording starts.

    Args:
        name: for errors.
        function: of a size; reads and writes tensors of fixed address only, does not synchronise
            with the host, and returns tensors whose shapes follow from the size.
        sizes: recorded when `is_captured`; any other size just runs.
        pool: of the recordings' memory; see `torch.cuda.graph_pool_handle`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[int], Sequence[Tensor]],
        sizes: GraphSizes,
        pool: Any = None,
    ) -> None:
        self.name = name
        self._function = function
        self._sizes = sizes
        self._pool = pool
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]] = {}

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Sizes that are recorded by now."""
        return tuple(sorted(self._graphs))

    def __call__(self, size: int) -> list[Tensor]:
        """The function's results, in memory that no later call writes to.

        Raises:
            PluginError: the function does what a CUDA graph cannot hold.
        """
        if not self._sizes.is_captured or size not in self._sizes.sizes:
            return list(self._function(size))
        if size not in self._graphs:
            outputs = list(self._function(size))
            self._graphs[size] = self._capture(size)
            return outputs
        graph, results = self._graphs[size]
        graph.replay()
        return [result.clone() for result in results]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
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
        return graph, results
