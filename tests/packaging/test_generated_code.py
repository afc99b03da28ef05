"""The committed protobuf code is what the .proto files generate, and the check notices when it is not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.repository import REPOSITORY


def check(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "scripts/generate_proto.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        REPOSITORY / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def test_the_committed_code_is_current() -> None:
    done = check(REPOSITORY, "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_changed_proto_is_noticed_and_generating_cures_it(copied: Path) -> None:
    proto = copied / "proto/phasor/v1/worker.proto"
    proto.write_text(
        proto.read_text(encoding="utf-8") + "\nmessage Added { int32 x = 1; }\n", encoding="utf-8"
    )
    done = check(copied, "--check")
    assert done.returncode == 1
    assert "proto/phasor/v1/worker_pb2.py " in done.stderr
    assert "make proto" in done.stderr
    assert check(copied).returncode == 0
    assert check(copied, "--check").returncode == 0


def test_a_module_whose_proto_is_gone_is_noticed(copied: Path) -> None:
    (copied / "proto/phasor/v1/worker.proto").unlink()
    done = check(copied, "--check")
    assert done.returncode == 1
    assert "worker_pb2_grpc.py" in done.stderr


def test_a_broken_proto_is_an_error(copied: Path) -> None:
    (copied / "proto/phasor/v1/worker.proto").write_text("message {", encoding="utf-8")
    assert check(copied, "--check").returncode != 0
