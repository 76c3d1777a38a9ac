"""The house style, held: files and functions stay small enough to be read in one go."""

import ast
from pathlib import Path
from statistics import median

import pytest

from tests.architecture.tree import OWN, PRODUCT, ROOT, python_files

FILE_LINES = 400
MEDIAN_FILE_LINES = 160
FUNCTION_LINES = 60


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_functions(source: str, limit: int) -> list[str]:
    sizes = (
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [f"{name}: {size} lines" for name, size in sizes if size > limit]


def holds_code(path: Path) -> bool:
    """Whether there is more in the file than a docstring: a bare `__init__` must not pull the median down."""
    return any(not isinstance(node, ast.Expr) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def test_no_file_is_long() -> None:
    sizes = {str(path.relative_to(ROOT)): lines(path) for path in python_files(*OWN)}
    long = {path: size for path, size in sizes.items() if size > FILE_LINES}
    assert not long, f"over {FILE_LINES} lines"


def test_the_median_file_is_short() -> None:
    assert median(lines(path) for path in python_files(*PRODUCT) if holds_code(path)) <= MEDIAN_FILE_LINES


def test_no_function_is_long() -> None:
    found = {
        str(path.relative_to(ROOT)): long
        for path in python_files(*OWN)
        if (long := long_functions(path.read_text(encoding="utf-8"), FUNCTION_LINES))
    }
    assert not found, f"over {FUNCTION_LINES} lines"


@pytest.mark.parametrize("header", ["def f():", "async def f():", "class C:\n  def f(self):"])
def test_the_measure_itself_sees_a_long_function(header: str) -> None:
    body = "\n".join(["    pass"] * 60)
    assert long_functions(f"{header}\n{body}", 60) == ["f: 61 lines"]
    assert long_functions(f"{header}\n{body}", 61) == []
