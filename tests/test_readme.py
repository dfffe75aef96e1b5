"""The table of kinds of fault names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS / "README.md").read_text()
ROWS = re.findall(r"^\| ([A-Z].*) \| (`.*) \|$", PAGE, flags=re.MULTILINE)
NAMED = [re.findall(r"`([\w./-]+)::(\w+)`", cell) for _, cell in ROWS]


def test_every_kind_of_fault_has_tests_and_is_told_once():
    kinds = [kind for kind, _ in ROWS]
    assert len(kinds) == len(set(kinds)) > 20
    assert all(NAMED)
    assert len(ROWS) == PAGE.count("\n| ") - 2


def test_every_test_that_the_table_names_exists():
    missing = [
        f"{path}::{name}"
        for path, name in (named for row in NAMED for named in row)
        if not (TESTS / path).exists()
        or not re.search(rf"^ *def {name}\(", (TESTS / path).read_text(), flags=re.MULTILINE)
    ]
    assert missing == []
