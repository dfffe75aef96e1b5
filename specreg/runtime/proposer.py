"""Asks the speculator for the next proposal, by a CUDA graph where it can be one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specreg.runtime.cuda_graphs import CapturedFunction, GraphSizes
from specreg.runtime.loading import Drafting
from specreg.runtime.plugin_checks import checked_tokens
from specreg.speculator import ProposeInputs, Speculator, SpeculatorBase

__all__ = ["Proposer"]


class Proposer:
    """Runs the speculator of a run.

    A speculator that declares `is_cuda_graph_safe`, and that proposes by `prepare` and `draft` as
    `SpeculatorBase` does, has its `draft` captured; any other runs as it is.

    Args:
        drafting: the speculator and what it was given.
        max_num_seqs: slots.
        sizes: what batches are padded to, and whether drafting may be captured.
        pool: of the graphs' memory.
        device: of the run.

    Attributes:
        draft: what is captured; never called where the speculator proposes on its own.
    """

    def __init__(
        self,
        drafting: Drafting,
        max_num_seqs: int,
        sizes: GraphSizes,
        pool: Any,
        device: torch.device,
    ) -> None:
        self._speculator, self._sampler = drafting.speculator, drafting.sampler
        # The sampler keeps what `begin` is given, and a graph its address.
        self._slots = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self._capturable = _capturable(drafting.speculator) if sizes.is_captured else None
        name = f"draft of {drafting.speculator.spec.name}"
        self.draft = CapturedFunction(name, self._draft, sizes, pool)

    def __call__(self, inputs: ProposeInputs) -> Tensor:
        """Draft tokens int64 `[num_reqs, num_speculative_tokens]`; -1 where there is none.

        Raises:
            PluginError: a speculator that declares `is_cuda_graph_safe` is not, or proposes
                something else than draft tokens.
        """
        slots = self._slots[: inputs.num_reqs]
        slots.copy_(inputs.sample_idx_mapping)
        self._sampler.begin(
            inputs.idx_mapping, slots, inputs.temperature, inputs.seeds, inputs.token_history
        )
        if self._capturable is None:
            output = self._speculator.propose(inputs)
            num_steps = self._sampler.num_speculative_tokens
            return checked_tokens(self._speculator.spec.name, output, inputs.num_reqs, num_steps)
        self._capturable.prepare(inputs)
        return self.draft(inputs.num_reqs)[0]

    def _draft(self, num_reqs: int) -> list[Tensor]:
        assert self._capturable is not None
        return [self._capturable.draft(num_reqs).tokens]


def _capturable(speculator: Speculator) -> SpeculatorBase | None:
    """The speculator, if its `draft` may be captured and is all that follows `prepare`."""
    if not isinstance(speculator, SpeculatorBase):
        return None
    if type(speculator).propose is not SpeculatorBase.propose:
        return None
    return speculator if speculator.context.capabilities.is_cuda_graph_safe else None
