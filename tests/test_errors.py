from __future__ import annotations

import re
from pathlib import Path

import pytest

from specreg import errors

DOCS = Path(__file__).parents[1] / "docs"


def classes() -> list[type[errors.SpecregError]]:
    return [getattr(errors, name) for name in errors.__all__]


def test_every_error_has_a_code_of_its_own():
    codes = [cls.code for cls in classes()]
    assert len(set(codes)) == len(codes)


def test_the_page_on_errors_lists_every_code_and_no_other():
    page = (DOCS / "errors.md").read_text()
    documented = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert sorted(documented) == sorted((cls.code, cls.__name__) for cls in classes())


@pytest.mark.parametrize("cls", classes())
def test_an_error_shows_its_code_and_four_parts(cls):
    error = cls("it failed", where="here", got="1; allowed: 2", fix="do that")
    shown = str(error)
    assert shown.splitlines()[0] == f"[{cls.code}] it failed"
    assert [line.split(":")[0].strip() for line in shown.splitlines()[1:]] == [
        "where",
        "got",
        "fix",
    ]
    assert isinstance(error, errors.SpecregError)
