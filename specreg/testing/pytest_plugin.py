"""The fixture behind `SpeculatorConformance`; installed as a pytest plugin.

Every pytest run of the environment imports this module: nothing heavy here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specreg.testing.lab_store import LabStore

__all__ = ["specreg_labs"]


@pytest.fixture(scope="session")
def specreg_labs() -> Iterator[LabStore]:
    """Labs of conformance classes; they share rank processes, started once a session."""
    from specreg.testing.lab_store import LabStore

    store = LabStore()
    yield store
    store.close()
