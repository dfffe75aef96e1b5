"""What `specreg check draft_model` proves."""

from __future__ import annotations

from pathlib import Path

from specreg.testing import Subject, perturbed_copy, save_kit_target

__all__ = ["tiny_subject"]


def tiny_subject(directory: Path) -> Subject:
    """A tiny target, and the same model with noise on its weights as drafter."""
    target = save_kit_target(directory / "target")
    draft = perturbed_copy(target, directory / "draft")
    return Subject(
        speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},
        target=str(target),
    )
