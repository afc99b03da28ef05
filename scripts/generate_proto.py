"""Generate the Python code of proto/phasor/v1/*.proto beside the .proto files, or check that it is current.

Does not decide when: `make proto` writes, `make lint` and a packaging test check.
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

REPOSITORY = Path(__file__).resolve().parent.parent
PROTO_ROOT = REPOSITORY / "proto"
WIRE_FOLDER = Path("phasor/v1")


def generate(out: Path) -> list[Path]:
    """Write the generated modules under `out`; return their paths relative to it.

    Raises:
        RuntimeError: protoc refused a .proto file; it has said why on stderr.
    """
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in (PROTO_ROOT / WIRE_FOLDER).glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{PROTO_ROOT}", f"-I{well_known}"]
    arguments += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", *protos]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(protos)}")
    return sorted(path.relative_to(out) for path in (out / WIRE_FOLDER).iterdir())


def stale_files(fresh: Path) -> list[Path]:
    """Return the committed files that are missing from, differ from, or are no longer part of `fresh`."""
    wanted = {path for path in generate(fresh) if not _is_empty_service(fresh / path)}
    committed = {path.relative_to(PROTO_ROOT) for path in (PROTO_ROOT / WIRE_FOLDER).glob("*_pb2*.py*")}
    differing = {
        path for path in wanted & committed if not filecmp.cmp(fresh / path, PROTO_ROOT / path, shallow=False)
    }
    return sorted((wanted ^ committed) | differing)


def _is_empty_service(path: Path) -> bool:
    # protoc writes a _grpc module for a .proto without a service too.
    return path.name.endswith("_pb2_grpc.py") and "class " not in path.read_text(encoding="utf-8")


def main() -> int:
    """Write or check, by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not current")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        stale = stale_files(fresh)
        if check:
            for path in stale:
                sys.stderr.write(f"proto/{path} is not what its .proto file generates: run `make proto`\n")
            return 1 if stale else 0
        for path in stale:
            source, target = fresh / path, PROTO_ROOT / path
            if source.exists():
                shutil.copyfile(source, target)
            else:
                target.unlink()
            sys.stdout.write(f"wrote proto/{path}\n" if source.exists() else f"removed proto/{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
