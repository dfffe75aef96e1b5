"""A rank other than 0, as a process: `python -m specreg.runtime.worker`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from typing import IO, Any

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from specreg.config import EngineConfig
from specreg.errors import RankFailedError
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
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
    with contextlib.closing(tp):
        runner = ModelRunner(load_models(config, tp))
        while sys.stdin.readline():
            _run(runner, tp)


def _run(runner: ModelRunner, tp: TensorParallel) -> None:
    """Execute plans until rank 0 sends an empty one."""
    while payload := tp.broadcast_bytes(None):
        runner.execute(StepPlan.from_bytes(payload))


if __name__ == "__main__":
    sys.exit(main())
