"""A rank other than 0, as a process: `python -m specreg.runtime.worker`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import traceback
from collections.abc import Iterator
from typing import IO, Any

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from specreg.config import EngineConfig
from specreg.errors import RankFailedError
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.peer_watch import PeerWatch
from specreg.runtime.step import StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.runtime.workers import (
    EXIT_ERROR,
    EXIT_LOST_PEER,
    joined_key,
    rank_device,
    threads_per_rank,
)

__all__ = ["main"]


def main() -> int:
    """Serve runs until standard input ends; returns the exit status.

    Standard output carries one JSON string, the reason, when the rank fails.
    """
    report = _take_standard_output()
    try:
        _serve(json.loads(sys.stdin.readline()))
    except RankFailedError as error:
        print(json.dumps(str(error)), file=report, flush=True)
        return EXIT_LOST_PEER
    except KeyboardInterrupt:  # Rank 0 got it too, and says so.
        return EXIT_LOST_PEER
    except Exception:
        print(json.dumps(traceback.format_exc().strip()), file=report, flush=True)
        return EXIT_ERROR
    return 0


def _take_standard_output() -> IO[str]:
    """Standard output for the report alone; what libraries print there goes to standard error.

    Nobody reads the pipe until the rank ends: a library that fills it would stop the run.
    """
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    return report


def _serve(start: dict[str, Any]) -> None:
    disable_progress_bar()  # type: ignore[no-untyped-call]  # Rank 0 shows progress.
    logging.basicConfig(level=start["log_level"], format="%(message)s")
    config = EngineConfig.model_validate(start["config"])
    size, rank = config.tensor_parallel_size, start["rank"]
    torch.set_num_threads(threads_per_rank(size))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", start["port"], is_master=False
    )
    store.set(joined_key(rank), "")
    tp = TensorParallel(rank, size, store=store, device=rank_device(config, rank))
    with (
        contextlib.closing(tp),
        _watching_rank_0(tp),
        contextlib.closing(ModelRunner(load_models(config, tp))) as runner,
    ):
        while sys.stdin.readline():
            _run(runner, tp)


@contextlib.contextmanager
def _watching_rank_0(tp: TensorParallel) -> Iterator[None]:
    """Abort what waits on a GPU once nobody holds the other end of standard input."""
    if tp.device.type != "cuda":
        yield
        return
    hang_up = select.poll()
    hang_up.register(sys.stdin.fileno(), select.POLLHUP)

    def is_lost() -> bool:
        return any(events & select.POLLHUP for _, events in hang_up.poll(0))

    with contextlib.closing(PeerWatch(is_lost, tp.abort)):
        yield


def _run(runner: ModelRunner, tp: TensorParallel) -> None:
    """Execute plans until rank 0 sends an empty one."""
    while payload := tp.broadcast_bytes(None):
        runner.execute(StepPlan.from_bytes(payload))


if __name__ == "__main__":
    sys.exit(main())
