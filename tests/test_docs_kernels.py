"""What the pages on kernels and the cache show is run, and names what exists."""

import re
from pathlib import Path

from specreg.kernels import random

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("kernels.md", "draft-logits-cache.md")


def test_the_snippet_on_the_page_on_the_cache_runs():
    (source,) = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "draft-logits-cache.md").read_text(), re.M | re.S
    )
    exec(compile(source, "draft-logits-cache.md", "exec"), {})


def test_files_that_the_pages_name_exist():
    for page in PAGES:
        for name in re.findall(
            r"`((?:tests|benchmarks|specreg)/[\w/.]+)`", (DOCS / page).read_text()
        ):
            assert (DOCS.parent / name).exists(), name


def test_the_streams_on_the_page_are_those_of_the_code():
    listed = re.search(r"\| stream \| (.*?) \|", (DOCS / "kernels.md").read_text())[1]
    names = {0: "draft", 1: "accept", 2: "residual", 3: "bonus", 4: "plain target"}
    assert listed == ", ".join(f"{number} {name}" for number, name in names.items())
    for number, name in names.items():
        assert getattr(random, f"STREAM_{name.split()[-1].upper()}") == number
