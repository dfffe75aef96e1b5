"""Run a function on every rank of a group, each rank a spawned process."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specreg.runtime.engine import Engine
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.outputs import GenerateOutputs
from specreg.runtime.step import StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.sampling_params import SamplingParams

__all__ = ["generate", "run_ranks"]

TIMEOUT_SECONDS = 120


def run_ranks(
    num_ranks: int, function: Callable[[TensorParallel], Any], device: str = "cpu"
) -> list[Any]:
    """`function(tp)` of every rank, in order; the first rank's traceback fails the test.

    `function` lives at module level and returns something that can be pickled. Ranks on `cuda` take
    the device of their number.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            place = torch.device(device, rank) if device == "cuda" else torch.device(device)
            arguments = (function, rank, num_ranks, str(Path(folder, "store")), place, sender)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        results = [_receive(receiver) for receiver in receivers]
        for process in processes:
            process.join(TIMEOUT_SECONDS)
    for rank, (is_ok, result) in enumerate(results):
        assert is_ok, f"rank {rank}:\n{result}"
    return [result for _, result in results]


class _Peers:
    """What an engine asks of its group of ranks, when something else has started these."""

    def __init__(self, tp: TensorParallel) -> None:
        self.tp, self.size = tp, tp.size

    def begin_run(self) -> None:
        """The others wait for plans already."""

    def explaining_failures(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        """Whoever has started the group closes it."""


def generate(
    runner: ModelRunner, prompts: Sequence[str], params: Sequence[SamplingParams]
) -> GenerateOutputs | None:
    """Run the prompts on all ranks, each of which calls this; outputs on rank 0."""
    tp = runner.models.tp
    if tp.rank == 0:
        peers: Any = _Peers(tp)
        return Engine(runner.models.config, peers, runner).generate(prompts, params)
    while payload := tp.broadcast_bytes(None):
        runner.execute(StepPlan.from_bytes(payload))
    return None


def _receive(receiver: Connection) -> tuple[bool, Any]:
    if not receiver.poll(TIMEOUT_SECONDS):
        return False, "no answer in time"
    try:
        answer: tuple[bool, Any] = receiver.recv()
    except EOFError:
        return False, "it died"
    return answer


def _rank(
    function: Callable[[TensorParallel], Any],
    rank: int,
    num_ranks: int,
    store_path: str,
    device: torch.device,
    sender: Connection,
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, num_ranks)
    tp = TensorParallel(rank, num_ranks, store=store, device=device)
    try:
        sender.send((True, function(tp)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        tp.close()
