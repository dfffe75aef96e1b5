from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted((ROOT / "specreg").rglob("*.py"))
    if path.read_text().strip()
}


def public_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return ast.literal_eval(node.value)
    return None


def bound_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def name_comparisons(source: str) -> list[str]:
    """Comparisons of a method, speculator or distribution with a literal string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        subject = ast.unparse(node.left)
        is_name = re.search(r"(^|[._])(method|speculator|distribution)$|spec\.name$", subject)
        is_literal = any(
            isinstance(item, ast.Constant) and isinstance(item.value, str)
            for side in node.comparators
            for item in ast.walk(side)
        )
        if is_name and is_literal and not subject.endswith("sample_method"):
            found.append(ast.unparse(node))
    return found


def test_public_names_are_listed_in_order_once_and_exist():
    for path, source in SOURCES.items():
        tree = ast.parse(source)
        names = public_names(tree)
        defines = any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in tree.body)
        assert names is not None or not defines, f"{path} lists no public names"
        listed = names or []
        # Constants, then classes, then functions, each by name.
        in_order = sorted(set(listed), key=lambda n: (not n.isupper(), not n[0].isupper(), n))
        assert listed == in_order, path
        assert set(listed) <= bound_names(tree), path


def test_every_module_of_the_core_says_what_it_is_for():
    silent = [path for path, source in SOURCES.items() if not ast.get_docstring(ast.parse(source))]
    assert silent == []


def test_the_core_compares_no_method_name():
    found = {path: name_comparisons(source) for path, source in SOURCES.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    ['if method == "eagle": pass', 'x = cfg.method in ("a", "b")', 'x = spec.name != "toy"'],
)
def test_a_comparison_with_a_method_name_would_be_found(source):
    assert name_comparisons(source)
