"""The tensor-parallel group of one run: every collective goes through here and is counted."""

from __future__ import annotations

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


class TensorParallel:
    """`size` ranks, of which this process is `rank`; with one, every collective is the identity.

    A collective whose peer has died raises `RankFailedError`. `counts` holds the number of
    collectives by kind since it was last cleared; with one rank it stays empty.

    Args:
        rank, size: this process in its group.
        store: rendezvous of the group; None for a single rank.
        device: where tensors live; CUDA devices use NCCL, all others gloo.
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
        with self._peers_alive():
            dist.init_process_group(
                "cuda:nccl,cpu:gloo" if self._is_cuda else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=COLLECTIVE_TIMEOUT,
            )

    def close(self) -> None:
        """Leave the group. Safe to call twice, and after a peer has died."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

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
        """`[size, *local.shape]`, rank by rank; `local` has the same shape on every rank."""
        if self.size == 1:
            return local.unsqueeze(0)
        gathered = local.new_empty((self.size, *local.shape))
        self.counts["all_gather"] += 1
        with self._peers_alive():
            dist.all_gather(list(_wire(gathered).unbind(0)), _wire(local.contiguous()))
        return gathered

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
        self.counts["all_to_all"] += 1
        with self._peers_alive():
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
        self.counts["all_reduce"] += 1
        with self._peers_alive():
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def _broadcast(self, tensor: Tensor) -> None:
        self.counts["broadcast"] += 1
        with self._peers_alive():
            dist.broadcast(tensor, src=0)

    @contextmanager
    def _peers_alive(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankFailedError(
                "a collective lost its peer",
                where=f"rank {self.rank} of {self.size}",
                got=str(error).strip().splitlines()[0],
                fix="look for the error of the rank that ended first",
            ) from error


def _wire(tensor: Tensor) -> Tensor:
    """The same bytes in a dtype that every backend moves."""
    return tensor.view(torch.float16) if tensor.dtype == torch.bfloat16 else tensor
