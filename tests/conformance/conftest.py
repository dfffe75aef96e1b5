"""One target for all toys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specreg.testing import Lab, Subject, save_kit_target
from specreg.testing.lab_store import LabStore

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def kit_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kit_target(tmp_path_factory.mktemp("kit") / "target")


@pytest.fixture
def toy(kit_target: Path, specreg_labs: LabStore) -> Callable[..., Lab]:
    """A lab for a toy by name."""

    def make(name: str, tps: tuple[int, ...] = (1, 2)) -> Lab:
        speculative = {"method": name, "num_speculative_tokens": 3}
        subject = Subject(speculative, str(kit_target), plugins=("toys:PLUGIN",))
        return specreg_labs.lab((name, tps), lambda: subject, tps)

    return make
