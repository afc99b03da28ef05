"""Nothing in Phasor unpickles: bytes from a socket, a store or a disk are never code.

Ray pickles its own control messages between our actors and the fleet; the request path does not pass
through Ray.
"""

import ast

import pytest

from tests.packaging.repository import ROOTS, our_python_files, parse

FORBIDDEN_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "ray.cloudpickle.loads"}
# torch.distributed's collectives of objects pickle what they carry.
OBJECT_COLLECTIVES = {
    "send_object_list",
    "recv_object_list",
    "broadcast_object_list",
    "scatter_object_list",
    "gather_object",
    "all_gather_object",
}


def unpicklers(tree: ast.Module) -> list[str]:
    """Return what in `tree` can unpickle, as text with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        bad = [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS]
        bad += [name for name in names if name.split(".")[-1] in OBJECT_COLLECTIVES]
        if dotted in FORBIDDEN_CALLS or dotted.split(".")[-1] in OBJECT_COLLECTIVES:
            bad.append(dotted)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            bad.append("allow_pickle")
        found += [f"line {getattr(node, 'lineno', '?')}: {name}" for name in bad]
    return found


def test_our_source_cannot_unpickle() -> None:
    files = our_python_files(*ROOTS, "scripts", "bench")
    assert len(files) > 20
    found = {path: unpicklers(parse(path)) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import json, cloudpickle as cp",
        "from pickle import loads",
        "def f():\n    import dill",
        "from torch import load",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_the_scan_finds(source: str) -> None:
    assert unpicklers(ast.parse(source)) != []


@pytest.mark.parametrize(
    "source", ["import json\njson.loads('1')", "import copyreg", "x.load()", "pickled = 1"]
)
def test_the_scan_leaves_alone(source: str) -> None:
    assert unpicklers(ast.parse(source)) == []
