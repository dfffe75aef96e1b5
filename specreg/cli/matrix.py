"""What sharding comes to for each installed speculator, one change of the run at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from specreg.capabilities import DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.errors import PolicyError
from specreg.policy import resolve
from specreg.registry import RegisteredSpeculator, Registry

__all__ = ["MatrixRow", "capability_matrix", "print_matrix"]

_TP_SIZE = 4
# Large enough that every reduced head or list of candidates is smaller.
_VOCAB_SIZE = 151_936


@dataclass(frozen=True)
class MatrixRow:
    """One outcome of a speculator.

    Attributes:
        speculator, distribution: whose.
        when: changes of the run that lead to it, each alone.
        cache: `sharded`, `replicated`, `none` or `refused`.
        layout: of the cache; None where there is none.
        rules: policy rules that fail; without a cache the one that decides that there is none.
    """

    speculator: str
    distribution: str
    when: tuple[str, ...]
    cache: str
    layout: str | None
    rules: tuple[str, ...]


def capability_matrix(registry: Registry) -> tuple[MatrixRow, ...]:
    """One row a speculator and distinct outcome.

    The run that the changes are made to is batch-sharded over four ranks, with probabilistic
    drafts, the stock rejection sampler and no watermarker. Facts that a draft config decides are
    those without a checkpoint, and what loading decides is taken to hold.
    """
    rows: list[MatrixRow] = []
    for entry in registry.speculators:
        alone = _alone(registry, entry)
        outcomes: dict[tuple[str, str | None, tuple[str, ...]], list[str]] = {}
        for change, keys in _changes(registry):
            outcomes.setdefault(_outcome(alone, entry.spec.name, keys), []).append(change)
        rows += (
            MatrixRow(entry.spec.name, entry.distribution, tuple(changes), *outcome)
            for outcome, changes in outcomes.items()
        )
    return tuple(rows)


def _changes(registry: Registry) -> Iterator[tuple[str, dict[str, Any]]]:
    """A label and the configuration keys of each run."""
    yield "all on", {}
    yield "greedy drafts", {"draft_sample_method": "greedy"}
    yield "batch-sharded sampling off", {"enable_batch_sharded_sampling": False}
    yield "one rank", {"tensor_parallel_size": 1}
    yield "fewer slots than ranks", {"max_num_seqs": _TP_SIZE - 1}
    yield "sharding off", {"draft_logits_sharding": "off"}
    for layout in DraftLogitsLayout:
        yield f"layout {layout.value}", {"draft_logits_layout": layout.value}
    for plugin in registry.plugins:
        for watermarker in plugin.draft_watermarkers:
            yield f"watermarker {watermarker.name}", {"draft_watermarker": watermarker.name}
        for sampler in plugin.rejection_samplers:
            yield f"sampler {sampler.name}", {"rejection_sampler": sampler.name}


def _alone(registry: Registry, entry: RegisteredSpeculator) -> Registry:
    """The registry with one speculator, which its name selects without a checkpoint."""
    spec = entry.spec
    bare = replace(
        spec,
        methods=(spec.name,),
        architectures=(),
        model_types=(),
        predicate=None,
        options_model=None,
        needs_checkpoint=False,
    )
    plugins = tuple(
        replace(plugin, speculators=(bare,) if spec in plugin.speculators else ())
        for plugin in registry.plugins
    )
    return Registry(plugins)


def _outcome(
    registry: Registry, method: str, keys: dict[str, Any]
) -> tuple[str, str | None, tuple[str, ...]]:
    sampling = keys.get("draft_sample_method", "probabilistic")
    run = {
        "speculative": {
            "method": method,
            "num_speculative_tokens": 1,
            "draft_sample_method": sampling,
        },
        "tensor_parallel_size": _TP_SIZE,
        "max_num_seqs": _TP_SIZE**2,
        "enable_batch_sharded_sampling": True,
        "vocab_size": _VOCAB_SIZE,
        "dtype": "bfloat16",
    }
    run |= {key: value for key, value in keys.items() if key != "draft_sample_method"}
    try:
        plan = resolve(EngineConfig.parse(run), registry)
    except PolicyError:  # Nothing requires sharding here: it is the layout that is not possible.
        return "refused", None, ()
    failed = tuple(verdict.rule for verdict in plan.failed_verdicts)
    if plan.layout is None:
        return "none", None, failed[:1]
    return "sharded" if plan.num_shards > 1 else "replicated", plan.layout.value, failed


def print_matrix(registry: Registry, *, as_json: bool) -> None:
    """Print the matrix as a table, or as one JSON object."""
    rows = capability_matrix(registry)
    if as_json:
        print(json.dumps({"matrix": [asdict(row) for row in rows]}, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(
        Column("speculator", no_wrap=True),
        "when",
        Column("cache", no_wrap=True),
        Column("layout", no_wrap=True),
        Column("rules that fail", no_wrap=True),
    )
    num_outcomes = Counter(row.speculator for row in rows)
    previous = None
    for row in rows:
        if previous not in (None, row.speculator):
            table.add_section()
        name = "" if row.speculator == previous else row.speculator
        when = "always" if num_outcomes[row.speculator] == 1 else ", ".join(row.when)
        table.add_row(name, when, row.cache, row.layout or "", "\n".join(row.rules))
        previous = row.speculator
    Console().print(table)
