"""The conformance kit: what a speculator's author, and specreg itself, prove plugins with.

Importing this package imports neither torch nor pytest; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specreg.testing.assertions import assert_close, assert_same_distribution
    from specreg.testing.batches import decode_batch, permuted, prompt_batch, with_padding
    from specreg.testing.checks import CHECKS, run_checks
    from specreg.testing.checks.result import CheckResult
    from specreg.testing.conformance import SpeculatorConformance
    from specreg.testing.guarded_cache import GuardedCache
    from specreg.testing.lab import Lab
    from specreg.testing.random_drafter import save_random_checkpoint, save_random_drafter
    from specreg.testing.subject import Subject, tiny_subject
    from specreg.testing.tiny_subjects import perturbed_copy, save_kit_target

__all__ = [
    "CHECKS",
    "CheckResult",
    "GuardedCache",
    "Lab",
    "SpeculatorConformance",
    "Subject",
    "assert_close",
    "assert_same_distribution",
    "decode_batch",
    "permuted",
    "perturbed_copy",
    "prompt_batch",
    "run_checks",
    "save_kit_target",
    "save_random_checkpoint",
    "save_random_drafter",
    "tiny_subject",
    "with_padding",
]

_MODULES = {
    "CHECKS": "checks",
    "CheckResult": "checks.result",
    "GuardedCache": "guarded_cache",
    "Lab": "lab",
    "SpeculatorConformance": "conformance",
    "Subject": "subject",
    "assert_close": "assertions",
    "assert_same_distribution": "assertions",
    "decode_batch": "batches",
    "permuted": "batches",
    "perturbed_copy": "tiny_subjects",
    "prompt_batch": "batches",
    "run_checks": "checks",
    "save_kit_target": "tiny_subjects",
    "save_random_checkpoint": "random_drafter",
    "save_random_drafter": "random_drafter",
    "tiny_subject": "subject",
    "with_padding": "batches",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
