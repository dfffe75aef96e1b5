"""Which speculator runs the modules that a checkpoint holds."""

from __future__ import annotations

from specreg.speculator import SpeculatorBase, SpeculatorContext
from specreg_mtp.checkpoint import MTPCheckpoint
from specreg_mtp.multi_module import MultiModuleSpeculator
from specreg_mtp.single_module import SingleModuleSpeculator

__all__ = ["make_speculator"]


def make_speculator(context: SpeculatorContext) -> SpeculatorBase:
    """One module a step where there are several and K is above 1; else one for all steps.

    Raises:
        CheckpointError: the checkpoint's modules do not serve the run.
    """
    checkpoint = MTPCheckpoint(context)
    if checkpoint.num_modules > 1:
        return MultiModuleSpeculator(context, checkpoint)
    return SingleModuleSpeculator(context, checkpoint)
