from __future__ import annotations

import logging

import pytest
from hypothesis import settings

# The same examples in every run, however long they take: other processes share the machine.
settings.register_profile("specreg", deadline=None, derandomize=True)
settings.load_profile("specreg")


@pytest.fixture(autouse=True)
def plain_log_level() -> None:
    """`specreg generate` sets a level for its process; no test sees what another has set."""
    logging.getLogger("specreg").setLevel(logging.NOTSET)
