from __future__ import annotations

from hypothesis import settings

# The same examples in every run, however long they take: other processes share the machine.
settings.register_profile("specreg", deadline=None, derandomize=True)
settings.load_profile("specreg")
