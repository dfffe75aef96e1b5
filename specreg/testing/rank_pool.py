"""Rank processes that are started once and form a gloo group for each job."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from specreg.errors import RankFailedError

__all__ = ["RankPool"]

TIMEOUT_SECONDS = 240.0
# Imported once, by the process that all ranks are forked from.
PRELOADED = [
    "specreg.runtime.engine",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]


class RankPool:
    """Up to `size` ranks, each a process.

    Args:
        size: the most ranks that a job may have.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_jobs = 0

    def start(self, num_ranks: int) -> None:
        """Start that many processes, so that a later job finds them ready."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        methods = multiprocessing.get_all_start_methods()
        has_server = "forkserver" in methods
        context = multiprocessing.get_context("forkserver" if has_server else "spawn")
        if has_server:
            context.set_forkserver_preload(PRELOADED)
        while len(self._pipes) < num_ranks:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(theirs,), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(tp, *args)` on every rank of a group of `num_ranks`, in order of rank.

        Args:
            num_ranks: at most `size`.
            function: at module level; it returns something that can be pickled, as `args` can.

        Raises:
            RankFailedError: a rank raised, died, or does not answer; the pool is closed.
        """
        assert num_ranks <= self.size
        self.start(num_ranks)
        assert self._folder is not None
        store = str(Path(self._folder.name, f"store-{self._num_jobs}"))
        self._num_jobs += 1
        for rank in range(num_ranks):
            self._pipes[rank].send((function, args, rank, num_ranks, store))
        answers = [_receive(pipe) for pipe in self._pipes[:num_ranks]]
        for rank, (is_ok, result) in enumerate(answers):
            if not is_ok:
                self.close()
                raise RankFailedError(
                    "a rank of the conformance run failed",
                    where=f"rank {rank} of {num_ranks}",
                    got=str(result),
                    fix="mend what its error names",
                )
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes. Safe to call twice; a later job starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _receive(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(TIMEOUT_SECONDS):
        return False, f"no answer in {TIMEOUT_SECONDS:g} s"
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "its process died"
    return answer


def _serve(pipe: Connection) -> None:
    """Do one job after another until the other end closes."""
    import torch
    import torch.distributed as dist

    from specreg.runtime.tensor_parallel import TensorParallel

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, size, store_path = pipe.recv()
        except EOFError:
            return
        store = dist.FileStore(store_path, size) if size > 1 else None  # type: ignore[attr-defined]
        tp = TensorParallel(rank, size, store=store)
        try:
            pipe.send((True, function(tp, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            tp.close()
