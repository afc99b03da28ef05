"""What all tests share: one compute thread, poisoned uninitialised memory, the models."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any kernel is imported: without a GPU, Triton kernels run in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

TORCH_FOLDERS = ("unit/engine", "unit/transport", "contract", "kernels", "e2e")


@pytest.fixture(scope="session")
def poisoned_torch() -> Iterator[None]:
    """One thread, and NaN in all memory that nobody wrote: code that reads it fails its test."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _poison_where_torch_is_used(request: pytest.FixtureRequest) -> None:
    if any(f"tests/{folder}" in request.node.path.as_posix() for folder in TORCH_FOLDERS):
        request.getfixturevalue("poisoned_torch")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a safetensors folder; fetched and converted on first use."""
    from phasor.engine.model_source import resolve_model

    return resolve_model("smollm2")
