"""Every error crosses processes whole (Ray pickles it), has a real gRPC status, and stands in one tree."""

import ast
import pickle

import grpc
import pytest

from phasor.core import errors
from phasor.core.errors import PhasorError, all_error_types
from tests.packaging.repository import ROOTS, our_python_files, parse

ARGUMENTS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "ConfigError": (("port", 70000, "give 0 to 65535"), {}),
    "UnsupportedModelError": (("rope_type", "yarn", "serve a model with default rope"), {}),
    "InvalidRequestError": (("temperature", float("inf"), "give a finite number"), {}),
    "ModelNotFoundError": (("gpt", "smollm2"), {}),
    "CapacityError": (("9 blocks asked for, 8 exist",), {"ever": True}),
    "LinkMismatchError": (("layers", (0, 1), (0, 1, 2)), {}),
}
"""How to make an error whose `__init__` takes more than a message."""


def example(cls: type[PhasorError]) -> PhasorError:
    """Return an error of exactly this class with every field set."""
    args, kwargs = ARGUMENTS.get(cls.__name__, (("what happened, with numbers: 3 of 4",), {}))
    return cls(*args, **kwargs)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("cls", all_error_types(), ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling(cls: type[PhasorError], protocol: int) -> None:
    error = example(cls)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert str(again) == str(error) != ""
    assert vars(again) == vars(error)
    assert again.args == (str(error),)
    assert str(pickle.loads(pickle.dumps(again))) == str(error)


@pytest.mark.parametrize("cls", all_error_types(), ids=lambda cls: cls.__name__)
def test_an_error_keeps_its_notes(cls: type[PhasorError]) -> None:
    error = example(cls)
    error.add_note("while opening a link")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while opening a link"]


@pytest.mark.parametrize("cls", all_error_types(), ids=lambda cls: cls.__name__)
def test_a_grpc_code_is_a_real_status_and_never_ok(cls: type[PhasorError]) -> None:
    assert isinstance(getattr(grpc.StatusCode, cls.grpc_code), grpc.StatusCode)
    assert cls.grpc_code != "OK"


def test_no_error_of_ours_is_defined_outside_the_tree() -> None:
    # The wire can only rebuild what `all_error_types` lists in every process.
    tree = {cls.__name__ for cls in all_error_types()}
    strays = []
    for path in our_python_files(*ROOTS):
        if path == "core/phasor/core/errors.py":
            continue
        for node in ast.walk(parse(path)):
            if (
                isinstance(node, ast.ClassDef)
                and {ast.unparse(base).split(".")[-1] for base in node.bases} & tree
            ):
                strays.append(f"{path}: {node.name}")
    assert strays == []
    assert all(cls.__module__ == errors.__name__ for cls in all_error_types())
