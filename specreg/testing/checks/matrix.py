"""The combinations that checks run over, and comparisons of their runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from specreg.testing.checks.result import Case, failed, told, verdict
from specreg.testing.lab import Lab
from specreg.testing.recording import Key
from specreg.testing.settings import Settings
from specreg.testing.turn_engine import Run

__all__ = [
    "case_name",
    "combinations",
    "compare_drafts",
    "each",
    "same_bits",
    "same_tokens",
    "violations",
]


def combinations(lab: Lab) -> Iterator[Settings]:
    """Every tp with every layout and every lossless rejection method; sharded where tp > 1."""
    for tp in lab.tps:
        for layout in lab.layouts:
            for method in lab.rejection_methods:
                yield lab.plain(tp, layout=layout, rejection=method)


def case_name(settings: Settings) -> str:
    """A combination in words."""
    parts = [f"tp {settings.tp}", f"{settings.max_num_seqs} slots"]
    if settings.layout != "auto":
        parts.append(settings.layout)
    return ", ".join([*parts, settings.rejection])


def each(
    lab: Lab, settings: Iterable[Settings], problems: Callable[[Settings], Iterable[str]]
) -> Iterator[Case]:
    """A case a setting; what a run raises refutes its case alone."""
    for each_settings in settings:
        name = case_name(each_settings)
        try:
            yield verdict(name, problems(each_settings))
        except Exception as error:
            yield failed(name, told(error))


def violations(run: Run, *kinds: str) -> list[str]:
    """What the ranks of a run did against the contract."""
    return [
        line if line.startswith("rank ") else f"rank {log.rank}: {line}"
        for log in run.logs
        for kind in kinds
        for line in log.violations.get(kind, [])
    ]


def same_tokens(run: Run, reference: Run, *, num_rounded: int = 0) -> list[str]:
    """Prompts whose outputs differ, unless they are no more than `num_rounded`."""
    lines = []
    for prompt, (got, wanted) in enumerate(zip(run.tokens, reference.tokens, strict=True)):
        if got != wanted:
            at = next(
                (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
                min(len(got), len(wanted)),
            )
            lines.append(
                f"prompt {prompt} goes another way at token {at}: {got[at : at + 4]}; "
                f"expected {wanted[at : at + 4]}"
            )
    return lines if len(lines) > num_rounded else []


def compare_drafts(run: Run, reference: Run, *, share_rounded: float = 0.0) -> list[str]:
    """Proposals for the same request after the same tokens that differ.

    Args:
        run, reference: to compare; proposals that only one of them has are left out.
        share_rounded: of the common proposals, may differ.
    """
    drafts, wanted = _drafts(run), _drafts(reference)
    common = drafts.keys() & wanted.keys()
    if not common:
        return ["the runs have no proposal in common"]
    different = sorted(key for key in common if not _agree(drafts[key], wanted[key]))
    if len(different) <= share_rounded * len(common):
        return []
    key = different[0]
    return [
        f"{len(different)} of {len(common)} proposals differ; seed {key.seed} at position "
        f"{key.position}: {drafts[key]}; expected {wanted[key]}"
    ]


def _agree(left: list[int], right: list[int]) -> bool:
    """Equal as far as both have drafts."""
    return all(a == b or a < 0 or b < 0 for a, b in zip(left, right, strict=True))


def _drafts(run: Run) -> dict[Key, list[int]]:
    return {
        key: proposal.tokens[row].tolist()
        for proposal in run.logs[0].proposals
        for row, key in enumerate(proposal.keys)
        if key is not None
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit equal."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
