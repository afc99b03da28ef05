"""What an import pulls in: the router and the client stay light, and only the actors know Ray."""

import pytest

from tests.packaging.repository import PYPROJECT, ROOTS, module_name, our_python_files, run_python

PROGRAM = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted({{name.split(".")[0] for name in sys.modules}} & set({forbidden!r})))
"""
HEAVY = ["torch", "triton", "ray", "transformers"]


def modules_of(portion: str) -> list[str]:
    """Return the modules of one portion; `__main__` and the Ray shells are programs, not libraries."""
    names = [module_name(path) for path in our_python_files(*ROOTS)]
    ours = [name for name in names if name == portion or name.startswith(f"{portion}.")]
    return [name for name in ours if name.rpartition(".")[2] not in ("__main__", "actor")]


def loaded(modules: list[str], forbidden: list[str]) -> list[str]:
    """Import `modules` in a fresh interpreter; return the forbidden packages that came along."""
    return run_python(PROGRAM.format(modules=modules, forbidden=forbidden)).split()


@pytest.mark.parametrize("portion", ["phasor.router", "phasor.client", "phasor.wire"])
def test_the_edge_loads_no_model_code(portion: str) -> None:
    modules = modules_of(portion)
    assert len(modules) > 1
    assert loaded(modules, HEAVY) == []


def test_the_package_itself_loads_nothing_heavy() -> None:
    assert loaded(["phasor.router"], [*HEAVY, "numpy"]) == []


def test_core_loads_the_standard_library_and_pydantic() -> None:
    assert (
        loaded(modules_of("phasor.core"), [*HEAVY, "numpy", "grpc", "google", "typer", "rich", "yaml"]) == []
    )


@pytest.mark.parametrize("portion", ["phasor.prefill_worker", "phasor.decode_worker", "phasor.transport"])
def test_a_worker_runs_without_ray(portion: str) -> None:
    modules = modules_of(portion)
    assert len(modules) > 1
    assert loaded(modules, ["ray"]) == []


def test_a_pure_core_runs_without_torch() -> None:
    (pure,) = (
        contract["source_modules"]
        for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
        if contract["name"].startswith("Pure cores")
    )
    assert len(pure) >= 5
    assert loaded(pure, ["torch", "grpc", "ray"]) == []


def test_the_probe_sees_what_was_imported() -> None:
    assert loaded(["json", "sqlite3"], ["sqlite3", "torch"]) == ["sqlite3"]
