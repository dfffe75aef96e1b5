"""Triton must be told to interpret before it is imported: these tests have a process of their own.

`tests/kernels/test_interpreter.py` starts it.
"""

import os

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]


def pytest_configure(config):
    # NumPy warns where a kernel computes both sides of a select, such as -inf - -inf.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
