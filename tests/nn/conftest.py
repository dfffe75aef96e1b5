"""Tiny models on one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models only wait for each other's threads."""
    torch.set_num_threads(1)
