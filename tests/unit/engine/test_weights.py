"""The weights' digest: of the content, and remembered."""

import json
import os
from pathlib import Path

import pytest

from phasor.engine.weights import weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(b"a" * 5_000_000)
    (folder / "model-2.safetensors").write_bytes(b"b" * 10)
    return folder


def test_depends_on_content_not_on_folder_or_time(folder: Path, tmp_path: Path) -> None:
    other = make_folder(tmp_path / "elsewhere")
    os.utime(other / "model-1.safetensors", (1, 1))
    cache = tmp_path / "cache"
    assert weights_digest(folder, cache_dir=cache) == weights_digest(other, cache_dir=cache)
    (other / "README.md").write_text("not weights")
    assert weights_digest(folder, cache_dir=cache) == weights_digest(other, cache_dir=cache)


@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors", "model-2.safetensors"])
def test_one_byte_changes_it(folder: Path, tmp_path: Path, name: str) -> None:
    cache = tmp_path / "cache"
    before = weights_digest(folder, cache_dir=cache)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    os.utime(folder / name, ns=(1, 1))  # same size; a clock may be too coarse to tell the writes apart
    assert weights_digest(folder, cache_dir=cache) != before


def test_swapped_files_change_it(folder: Path, tmp_path: Path) -> None:
    before = weights_digest(folder, cache_dir=tmp_path / "cache")
    (folder / "model-1.safetensors").rename(folder / "x")
    (folder / "model-2.safetensors").rename(folder / "model-1.safetensors")
    (folder / "x").rename(folder / "model-2.safetensors")
    assert weights_digest(folder, cache_dir=tmp_path / "cache") != before


def test_second_call_reads_nothing(folder: Path, tmp_path: Path) -> None:
    read: list[int] = []
    first = weights_digest(folder, cache_dir=tmp_path / "cache", progress=read.append)
    assert sum(read) == 5_000_000 + 10 + 2
    read.clear()
    assert weights_digest(folder, cache_dir=tmp_path / "cache", progress=read.append) == first
    assert read == []
    (folder / "model-2.safetensors").write_bytes(b"c" * 11)
    assert weights_digest(folder, cache_dir=tmp_path / "cache", progress=read.append) != first
    assert sum(read) == 11


def test_cache_that_cannot_be_used_is_only_slower(folder: Path, tmp_path: Path) -> None:
    want = weights_digest(folder, cache_dir=tmp_path / "cache")
    in_the_way = tmp_path / "a-file"
    in_the_way.write_text("")
    assert weights_digest(folder, cache_dir=in_the_way / "cache") == want


@pytest.mark.parametrize("content", ["", "not json", json.dumps([1]), '{"unrelated": "x"}'])
def test_damaged_cache_is_ignored(folder: Path, tmp_path: Path, content: str) -> None:
    want = weights_digest(folder, cache_dir=tmp_path / "cache")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "digests.json").write_text(content)
    assert weights_digest(folder, cache_dir=damaged) == want
