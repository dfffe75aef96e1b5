"""A check for drafters whose tables and candidates are of the target's vocabulary."""

from __future__ import annotations

import torch

from specreg.errors import CheckpointError
from specreg.speculator import TargetView
from specreg_dflash.backbone import Backbone

__all__ = ["require_whole_vocabulary"]


def require_whole_vocabulary(backbone: Backbone, target: TargetView) -> None:
    """Check that a column of the head is the target id of the same number, and every one is there.

    Args:
        backbone: attached to the target.
        target: the target.

    Raises:
        CheckpointError: another number of columns, or a map that moves ids.
    """
    config, target_ids = backbone.config, backbone.ends.target_ids
    got = ""
    if config.vocab_size != target.vocab_size:
        got = f"vocab_size {config.vocab_size}"
    elif target_ids is not None and not torch.equal(target_ids, torch.arange(len(target_ids))):
        got = "a map d2t that moves ids"
    if got:
        raise CheckpointError(
            "a drafter that chooses among candidates has another vocabulary than the target",
            where=config.where,
            got=f"{got}; allowed: the target's {target.vocab_size} ids, each at its own place",
            fix="use a drafter that was trained for this target",
        )
