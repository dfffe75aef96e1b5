"""The page on conformance lists the checks, and its snippet is a test class."""

from __future__ import annotations

import re
from pathlib import Path

import specreg.testing
from specreg.testing import CHECKS, SpeculatorConformance

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()


def test_the_table_lists_every_check_in_order():
    listed = re.findall(r"^\| `([^`]+: [^`]+)` \|", PAGE, flags=re.MULTILINE)
    assert listed == [check.name for check in CHECKS]


def test_the_snippet_defines_a_conformance_class():
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    namespace = {}
    exec(compile(source, "conformance.md", "exec"), namespace)
    assert issubclass(namespace["TestMine"], SpeculatorConformance)


def test_the_names_on_the_page_exist():
    for name in ("GuardedCache", "assert_close", "decode_batch", "perturbed_copy", "with_padding"):
        assert f"`{name}" in PAGE
        assert getattr(specreg.testing, name)
