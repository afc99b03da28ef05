"""Files and functions stay small enough to read: 500 lines, 60 lines, 150 in a kernel."""

import ast

import pytest

from tests.packaging.repository import REPOSITORY, our_python_files, parse, repository_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150


def long_functions(tree: ast.Module, limit: int) -> list[tuple[str, int]]:
    """Return (name, lines) of each function over the limit, from `def` to its last line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [(name, lines) for name, lines in sizes if lines > limit]


def test_no_file_is_too_long() -> None:
    sizes = {
        path: len((REPOSITORY / path).read_text(encoding="utf-8").splitlines()) for path in our_python_files()
    }
    assert sizes
    assert {path: lines for path, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    offenders = {}
    for path in our_python_files():
        limit = MAX_KERNEL_LINES if path.startswith("kernels/") else MAX_FUNCTION_LINES
        for name, lines in long_functions(parse(path), limit):
            offenders[f"{path}:{name}"] = lines
    assert offenders == {}


@pytest.mark.parametrize(("num_lines", "too_long"), [(60, False), (61, True)])
def test_the_ruler_counts_from_def_to_the_last_line(num_lines: int, too_long: bool) -> None:
    source = "class A:\n    @property\n    async def f(self):\n" + "        pass\n" * (num_lines - 1)
    assert bool(long_functions(ast.parse(source), 60)) is too_long


def test_no_module_is_a_drawer_for_everything() -> None:
    assert [path for path in repository_files("*.py") if path.endswith(("/utils.py", "/util.py"))] == []
