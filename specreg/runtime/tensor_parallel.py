"""The tensor-parallel group of one run: every collective goes through here and is counted."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from specreg.errors import ConfigError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

__all__ = ["TensorParallel"]

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
SECONDS_TO_LAUNCH = 1.0

# Unless told otherwise torch ends the whole process when a collective of NCCL is aborted.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class TensorParallel:
    """`size` ranks, of which this process is `rank`; with one, every collective is the identity.

    Over gloo a collective whose peer has died raises `RankFailedError`. NCCL notices nothing and
    waits on the device for ever; see `abort`.

    Args:
        rank, size: this process in its group.
        store: rendezvous of the group; None for a single rank.
        device: where tensors live; CUDA devices use NCCL, all others gloo.

    Attributes:
        counts: collectives by kind since it was last cleared; with one rank it stays empty.
        num_bytes: bytes of their results on this rank, likewise.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        store: Store | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._is_aborted = False
        self._launching = threading.Lock()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # where kernels launch, and NCCL communicates
        if size == 1:
            return
        if dist.is_initialized():
            raise ConfigError(
                "the tensor-parallel group cannot be formed",
                where="torch.distributed of this process",
                got="a default process group that something else has initialised",
                fix="destroy it first, or run one engine with tensor_parallel_size > 1 a process",
            )
        self._is_cuda = self.device.type == "cuda"
        with self._peers_alive(), _default_in_environment(ERROR_HANDLING, "0"):
            dist.init_process_group(
                "cuda:nccl,cpu:gloo" if self._is_cuda else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=COLLECTIVE_TIMEOUT,
            )

    def close(self) -> None:
        """Leave the group. Safe to call twice, and after a peer has died.

        CUDA graphs that hold collectives are released before.
        """
        if self.size > 1 and dist.is_initialized():
            if self._is_cuda:  # Leaving in order would wait for the peers.
                self.abort()
            dist.destroy_process_group()

    def abort(self) -> None:
        """End the collectives that wait on the device for a peer that is gone; from any thread.

        What they leave in their results means nothing, and `raise_if_aborted` says so. Returns when
        the CUDA graphs that hold collectives are released.
        """
        # Aborting takes torch's own lock until the graphs are released, and so a collective that is
        # launched meanwhile would never return. One whose launch hangs is let go by the abort.
        has_lock = self._launching.acquire(timeout=SECONDS_TO_LAUNCH)
        is_first, self._is_aborted = not self._is_aborted, True
        if has_lock:
            self._launching.release()
        if is_first and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def raise_if_aborted(self) -> None:
        """To be called where results have reached the host, before anything is built on them.

        Raises:
            RankFailedError: `abort` was called.
        """
        if self._is_aborted:
            raise self._lost_peer("NCCL was aborted because a rank has ended")

    def clear_counts(self) -> None:
        """Start counting anew."""
        self.counts.clear()
        self.num_bytes.clear()

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's `payload`, which may be empty, on every rank; the others pass None."""
        if self.size == 1:
            assert payload is not None
            return payload
        length = torch.tensor([len(payload or b"")])
        self._broadcast(length)
        if int(length) == 0:
            return b""
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if payload is not None:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._broadcast(buffer)
        return buffer.numpy().tobytes()

    def all_gather(self, local: Tensor) -> Tensor:
        """`[size, *local.shape]`, rank by rank; `local` has one shape on every rank, not `[]`."""
        if self.size == 1:
            return local.unsqueeze(0)
        shape = (self.size * local.shape[0], *local.shape[1:])
        # Integers become indices: what an aborted collective leaves must still be one.
        gathered = local.new_empty(shape) if local.is_floating_point() else local.new_zeros(shape)
        self._count("all_gather", gathered)
        with self._peers_alive(), self._launch():
            _all_gather_single(_wire(gathered), _wire(local.contiguous()))
        return gathered.view(self.size, *local.shape)

    def all_gather_columns(self, local: Tensor) -> Tensor:
        """`[n, size * width]` from every rank's `[n, width]` columns."""
        if self.size == 1:
            return local
        gathered = self.all_gather(local)
        return gathered.transpose(0, 1).reshape(local.shape[0], -1)

    def all_to_all_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[r]` consecutive rows of `rows [n, width]` to rank r; counts may be zero.

        Returns:
            `[sum(receive), width]`, the received rows, sender by sender.
        """
        if self.size == 1:
            return rows
        received = rows.new_empty((sum(receive), rows.shape[1]))
        self._count("all_to_all", received)
        with self._peers_alive(), self._launch():
            dist.all_to_all_single(
                _wire(received), _wire(rows.contiguous()), list(receive), list(send)
            )
        return received

    def all_agree(self, holds: bool) -> bool:
        """Whether `holds` is true on every rank."""
        return self.smallest(int(holds)) == 1

    def smallest(self, value: int) -> int:
        """The least of the ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value])
        self._count("all_reduce", tensor)
        with self._peers_alive():
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def _broadcast(self, tensor: Tensor) -> None:
        self._count("broadcast", tensor)
        with self._peers_alive():
            dist.broadcast(tensor, src=0)

    def _count(self, kind: str, result: Tensor) -> None:
        self.counts[kind] += 1
        self.num_bytes[kind] += result.nbytes

    @contextmanager
    def _launch(self) -> Iterator[None]:
        """Around a collective on the device: none is launched once the group is aborted."""
        with self._launching:
            self.raise_if_aborted()
            yield

    @contextmanager
    def _peers_alive(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._lost_peer(str(error).strip().splitlines()[0]) from error

    def _lost_peer(self, got: str) -> RankFailedError:
        return RankFailedError(
            "a collective lost its peer",
            where=f"rank {self.rank} of {self.size}",
            got=got,
            fix="look for the error of the rank that ended first",
        )


@contextmanager
def _default_in_environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment meanwhile, unless it is set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _all_gather_single(gathered: Tensor, local: Tensor) -> None:
    """`gathered` gets every rank's `local`, one behind the other along the first dimension."""
    newer = getattr(dist, "all_gather_single", None)  # torch 2.13 deprecates the older name
    (newer or dist.all_gather_into_tensor)(gathered, local)


def _wire(tensor: Tensor) -> Tensor:
    """The same bytes in a dtype that every backend moves."""
    return tensor.view(torch.float16) if tensor.dtype == torch.bfloat16 else tensor
