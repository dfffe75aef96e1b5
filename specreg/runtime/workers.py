"""The ranks of one engine: rank 0 lives in the caller's process and starts the others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

import torch
import torch.distributed as dist

from specreg.config import EngineConfig
from specreg.errors import ConfigError, RankFailedError
from specreg.runtime.peer_watch import PeerWatch
from specreg.runtime.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["RankGroup", "rank_device", "threads_per_rank"]

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02
EXIT_ERROR = 1
EXIT_LOST_PEER = 3


def threads_per_rank(num_ranks: int) -> int:
    """Compute threads of a rank: an equal share of the cores.

    Every rank must use the same number: a different split of a sum changes its last bits, and
    replicated drafting must agree bit for bit.
    """
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank: CUDA devices are numbered by rank. Raises `ConfigError`."""
    if config.device == "cpu":
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            "a rank has no device",
            where=f"config.device, rank {rank}",
            got=f"{config.device!r} with {torch.cuda.device_count()} devices; allowed: one a rank",
            fix="lower tensor_parallel_size, set device to 'cpu', or install torch for your device",
        )
    return torch.device(config.device, rank)


class RankGroup:
    """Rank 0's `TensorParallel` and the processes of all other ranks.

    A worker reads a start message from its standard input and then one line a run; the end of its
    input ends it, so it never outlives rank 0. Its last words come back on its standard output.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.tensor_parallel_size
        self._processes: list[subprocess.Popen[str]] = []
        self._watch: PeerWatch | None = None
        self._num_threads_before = torch.get_num_threads()
        if self.size == 1:
            self.tp = TensorParallel(device=rank_device(config, 0))
            return
        torch.set_num_threads(threads_per_rank(self.size))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, world_size=self.size, is_master=True, wait_for_workers=False
        )
        start = {
            "config": config.model_dump(mode="json"),
            "port": store.port,
            "log_level": logging.getLogger("specreg").getEffectiveLevel(),
        }
        try:
            self._processes = [self._spawn({**start, "rank": r}) for r in range(1, self.size)]
            self._await_joining(store)
            self.tp = TensorParallel(0, self.size, store=store, device=rank_device(config, 0))
            if self.tp.device.type == "cuda":
                self._watch = PeerWatch(self._has_lost_worker, self.tp.abort)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1 and up, in order."""
        return [process.pid for process in self._processes]

    def begin_run(self) -> None:
        """Wake the workers for one run of steps."""
        for process in self._processes:
            _send(process, "run")

    @contextlib.contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """Replace a lost collective by the error of the rank that caused it."""
        try:
            yield
        except RankFailedError as error:
            cause = self._failure()
            if cause is None:
                raise
            raise cause from error

    def close(self) -> None:
        """Leave the group and end every worker, by force after a grace period.

        CUDA graphs that hold collectives are released before.
        """
        if self._watch is not None:
            self._watch.close()
        for process in self._processes:
            _close_quietly(process.stdin)
        if hasattr(self, "tp"):
            self.tp.close()  # A worker that waits in a collective notices, and ends.
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close_quietly(process.stdout)
        self._processes = []
        if self.size > 1:
            torch.set_num_threads(self._num_threads_before)

    def _spawn(self, start: dict[str, object]) -> subprocess.Popen[str]:
        threads = str(threads_per_rank(self.size))
        process = subprocess.Popen(
            [sys.executable, "-m", "specreg.runtime.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "PYTHONSAFEPATH": "1",  # A file of the user's folder must not pass for a package.
            },
        )
        _send(process, json.dumps(start))
        return process

    def _await_joining(self, store: Store) -> None:
        """Wait until every worker has reached the store, or one has died on the way."""
        for rank, process in enumerate(self._processes, start=1):
            while not store.check([joined_key(rank)]):
                if process.poll() is not None:
                    failure = self._failure()
                    assert failure is not None
                    raise failure
                time.sleep(POLL_SECONDS)

    def _failure(self) -> RankFailedError | None:
        """Why a worker ended: the first cause, not the peers that lost it."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not self._has_cause():
            time.sleep(POLL_SECONDS)
        ended = [
            (rank, process)
            for rank, process in enumerate(self._processes, start=1)
            if process.poll() is not None
        ]
        if not ended:
            return None
        rank, process = min(ended, key=lambda pair: pair[1].returncode == EXIT_LOST_PEER)
        return RankFailedError(
            "a rank of the tensor-parallel group ended",
            where=f"rank {rank} of {self.size}",
            got=_last_words(process),
            fix="mend what its error names, then start the engine again",
        )

    def _has_lost_worker(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def _has_cause(self) -> bool:
        return any(p.poll() not in (None, 0, EXIT_LOST_PEER) for p in self._processes)


def joined_key(rank: int) -> str:
    """Key that a worker sets in the store once it is up."""
    return f"joined/{rank}"


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has died; the next collective says so.
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _close_quietly(stream: IO[str] | None) -> None:
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def _last_words(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    words = process.stdout.read().strip()
    if words:
        with contextlib.suppress(ValueError):
            return str(json.loads(words.splitlines()[-1]))
        return words
    code = process.returncode
    return f"killed by signal {-code}" if code < 0 else f"exit status {code} without a message"
