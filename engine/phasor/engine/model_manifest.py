"""What a converted model folder says about itself, and whether that is still true.

The manifest is written last, so a folder without one is unfinished. It never describes folders of the user's own.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MANIFEST_NAME = "phasor-manifest.json"
MANIFEST_FORMAT = 1
_CHUNK_BYTES = 4 * 2**20


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the hex SHA-256 of a file.

    Args:
        path: the file.
        on_bytes: called with the number of bytes read so far.
    """
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes is not None:
                on_bytes(done)
    return digest.hexdigest()


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Record every file of `folder` with size and SHA-256, and make all of it durable (fsync).

    Args:
        folder: finished but for the manifest.
        facts: what else to record: model, conversion_version, source and the like.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        stat = path.stat()
        files[path.name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_of(path)}
    manifest = {"format": MANIFEST_FORMAT, **facts, "files": files}
    target = folder / MANIFEST_NAME
    target.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync(target)
    _sync(folder)


def find_damage(folder: Path, facts: Mapping[str, Any], *, thorough: bool = False) -> str | None:
    """Say why `folder` cannot be used as it is; None if it can.

    Args:
        folder: where the model should be.
        facts: what the manifest must say (keys it has beyond these do not matter).
        thorough: compute every digest. Otherwise a file with its recorded size and modification time is believed,
            and only one whose time differs is read.
    """
    if not folder.is_dir():
        return "it does not exist"
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return f"its {MANIFEST_NAME} is missing or unreadable"
    for key, expected in {"format": MANIFEST_FORMAT, **facts}.items():
        if manifest.get(key) != expected:
            return f"it was made with {key}={manifest.get(key)!r}, now {expected!r}"
    for name, recorded in files.items():
        path = folder / name
        try:
            stat = path.stat()
            if stat.st_size != recorded["bytes"]:
                return f"{name} has {stat.st_size} bytes, not {recorded['bytes']}"
            suspect = thorough or stat.st_mtime_ns != recorded["mtime_ns"]
            if suspect and sha256_of(path) != recorded["sha256"]:
                return f"{name} has other content than when it was made"
        except (OSError, TypeError, KeyError):
            return f"{name} is missing or unreadable"
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
