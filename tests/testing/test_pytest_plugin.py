"""The kit is a pytest plugin that other runs of pytest do not feel."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from specreg.errors import ConfigError
from specreg.testing import tiny_subject


def test_the_plugin_is_published_and_imports_nothing_heavy():
    (found,) = [e for e in entry_points(group="pytest11") if e.name == "specreg"]
    code = (
        f"import sys, {found.value}\n"
        "heavy = {'torch', 'transformers', 'triton', 'pydantic'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_of_the_kit_is_an_attribute_error():
    import specreg.testing

    with pytest.raises(AttributeError, match="no attribute 'asert_close'"):
        _ = specreg.testing.asert_close


def test_a_speculator_that_is_not_installed_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="draft_model"):
        tiny_subject("draft_modle", tmp_path)
