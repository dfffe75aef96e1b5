"""The same runs on real ranks: processes, and collectives over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from specreg.config import EngineConfig
from specreg.runtime.engine import Engine
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.step import StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.runtime.workers import RankGroup
from specreg.testing.calls import CALLS
from specreg.testing.checks.result import Case, Check, failed, passed, told, verdict
from specreg.testing.lab import Lab
from specreg.testing.subject import Subject
from specreg.testing.turn_engine import JoinedRanks

__all__ = ["CHECKS", "generate_on_rank"]

CALL = "trio"


def generate_on_rank(
    tp: TensorParallel, subject: Subject, config: EngineConfig
) -> tuple[list[list[int]], dict[str, int]] | None:
    """One call on one rank of a group; rank 0 returns tokens and its collectives by kind."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    models = load_models(config, tp, registry=subject.registry())
    runner = ModelRunner(models)
    if tp.rank > 0:
        while payload := tp.broadcast_bytes(None):
            runner.execute(StepPlan.from_bytes(payload))
        return None
    outputs = Engine(config, cast(RankGroup, JoinedRanks(tp)), runner).generate(*CALLS[CALL])
    return [output.token_ids for output in outputs], outputs.stats.num_collectives


def gloo(lab: Lab) -> Iterator[Case]:
    """Tokens and counts of collectives, sharded and not, as of ranks that take turns."""
    several = [tp for tp in lab.tps if tp > 1]
    if not several:
        yield passed("one rank has no collectives")
    for tp in several:
        settings = lab.plain(tp)
        try:
            here = lab.run(settings, CALL)
            arms = [settings, replace(settings, sharding="off")] if tp == several[0] else [settings]
            found = [
                lab.pool.run(tp, generate_on_rank, lab.subject, lab.config(arm))[0] for arm in arms
            ]
        except Exception as error:
            yield failed(f"tp {tp}", told(error))
            continue
        lines = []
        for tokens, counts in found:
            if tokens != here.tokens:
                lines.append("processes emit other tokens than ranks that take turns")
            if counts != here.stats.num_collectives:
                lines.append(f"collectives {counts}; in turn: {here.stats.num_collectives}")
        yield verdict(f"tp {tp}", lines)


CHECKS = (Check("ranks: processes over gloo agree with ranks in turn", gloo),)
