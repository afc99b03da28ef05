"""A digest of a model's weights by content, remembered so that a second start does not read them again."""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phasor.core.errors import ConfigError

_CHUNK_BYTES = 4 * 2**20


def weights_digest(folder: Path, *, cache_dir: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 (hex) over the contents of the folder's weight files and config, in order of name.

    Args:
        folder: holds *.safetensors and config.json.
        cache_dir: where digests are remembered by path, size and modification time.
        progress: called with the number of bytes read, from several threads.
    """
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    memory = cache_dir / "digests.json"
    known = _load(memory)
    with ThreadPoolExecutor(max_workers=min(8, len(files))) as pool:
        digests = list(pool.map(lambda path: _file_digest(path, known, progress), files))
    _save(memory, known)
    whole = hashlib.sha256(b"phasor-weights-v1")
    for path, digest in zip(files, digests, strict=True):
        whole.update(f"{path.name}:{digest};".encode())
    return whole.hexdigest()


def _file_digest(path: Path, known: dict[str, str], progress: Callable[[int], None] | None) -> str:
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    if key in known:
        return known[key]
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                if progress is not None:
                    progress(len(chunk))
    except OSError as exc:
        raise ConfigError("model.path", str(path), f"cannot be read: {exc}") from exc
    known[key] = digest.hexdigest()
    return known[key]


def _load(memory: Path) -> dict[str, str]:
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _save(memory: Path, known: dict[str, str]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(memory)
    except OSError:
        # A read-only home costs the next start a few seconds, nothing else.
        return
