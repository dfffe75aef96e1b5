"""Which speculators may be captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specreg.runtime.proposer import _capturable
from specreg.speculator import DraftOutput, ProposeInputs, SpeculatorBase


def declared(kind: type[SpeculatorBase], *, is_safe: bool) -> Any:
    capabilities = SimpleNamespace(is_cuda_graph_safe=is_safe)
    speculator = kind.__new__(kind)
    speculator.context = SimpleNamespace(capabilities=capabilities)  # type: ignore[assignment]
    return speculator


class Stock(SpeculatorBase):
    pass


class OwnWay(SpeculatorBase):
    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("speculator", "is_capturable"),
    [
        (declared(Stock, is_safe=True), True),
        (declared(Stock, is_safe=False), False),
        (declared(OwnWay, is_safe=True), False),
        (SimpleNamespace(), False),
    ],
)
def test_only_a_declared_draft_that_is_all_of_a_proposal_is_captured(
    speculator: Any, is_capturable: bool
) -> None:
    assert _capturable(speculator) is (speculator if is_capturable else None)
