"""Configuration: every wrong key or value is one sentence that names the field and the way out."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from phasor.core.config import (
    FleetConfig,
    KVConfig,
    RouterConfig,
    ServingConfig,
    WorkerConfig,
    build,
    load_file,
    parse_bytes,
)
from phasor.core.errors import ConfigError


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError) as caught:
        build(ServingConfig, {"routr": {}})
    assert caught.value.field == "routr"
    assert "unknown key" in str(caught.value)
    assert "'router'" in str(caught.value)


def test_an_unknown_nested_key_is_compared_with_its_own_section() -> None:
    with pytest.raises(ConfigError) as caught:
        build(ServingConfig, {"kv": {"block_token": 16}}, source="phasor.toml")
    assert caught.value.field == "kv.block_token"
    assert caught.value.value == 16
    assert "did you mean 'block_tokens'?" in str(caught.value)
    assert "phasor.toml" in str(caught.value)


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        build(WorkerConfig, {"kv": {"zzz": 1}})
    assert "known keys: memory_bytes, block_tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "values", "field"),
    [
        (KVConfig, {"block_tokens": 0}, "block_tokens"),
        (KVConfig, {"block_tokens": 1025}, "block_tokens"),
        (KVConfig, {"memory_bytes": -1}, "memory_bytes"),
        (RouterConfig, {"port": 65536}, "port"),
        (RouterConfig, {"port": -1}, "port"),
        (RouterConfig, {"default_timeout_s": 0}, "default_timeout_s"),
        (RouterConfig, {"default_timeout_s": math.nan}, "default_timeout_s"),
        (RouterConfig, {"default_timeout_s": math.inf}, "default_timeout_s"),
        (FleetConfig, {"num_decode": 0}, "num_decode"),
        (FleetConfig, {"cpus_per_worker": math.nan}, "cpus_per_worker"),
        (WorkerConfig, {"model": {"dtype": "float8"}}, "model.dtype"),
        (WorkerConfig, {"scheduler": {"max_step_tokens": "many"}}, "scheduler.max_step_tokens"),
        (WorkerConfig, {"transport": {"timeout_s": 3601}}, "transport.timeout_s"),
        (WorkerConfig, {"model": 7}, "model"),
    ],
)
def test_a_wrong_value_names_field_and_value(cls: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(cls, values)
    assert caught.value.field == field
    given: Any = values
    for part in field.split("."):
        given = given[part]
    assert caught.value.value is given
    assert str(caught.value).startswith(f"{field}={given!r}: ")


def test_bounds_themselves_are_allowed() -> None:
    assert build(KVConfig, {"block_tokens": 1}).block_tokens == 1
    assert build(KVConfig, {"block_tokens": 1024}).block_tokens == 1024
    assert build(RouterConfig, {"port": 0, "default_timeout_s": 3600}).port == 0


def test_a_section_is_frozen() -> None:
    with pytest.raises(ValidationError):
        KVConfig().block_tokens = 32  # type: ignore[misc]


def test_a_worker_takes_its_own_role_s_scheduler_and_the_shared_parts() -> None:
    config = build(
        ServingConfig,
        {
            "prefill": {"max_step_tokens": 64},
            "decode": {"max_running": 3},
            "transport": {"host": "127.0.0.2"},
            "kv": {"block_tokens": 8},
        },
    )
    prefill, decode = config.worker("prefill"), config.worker("decode")
    assert (prefill.scheduler.max_step_tokens, decode.scheduler.max_step_tokens) == (64, 512)
    assert (prefill.scheduler.max_running, decode.scheduler.max_running) == (32, 3)
    assert prefill.kv == decode.kv == config.kv
    assert prefill.host == decode.host == "127.0.0.2"


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "phasor.toml"
    file.write_text('[model]\npath = "x"\n[kv]\nblock_tokens = 32\n', encoding="utf-8")
    config = load_file(file)
    assert (config.model.path, config.kv.block_tokens) == ("x", 32)
    assert config.router == RouterConfig()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[kv\n", "not a TOML file"),
        (b"a = \xff\n", "not a TOML file"),
        (b"[kv]\nblok_tokens = 1\n", "did you mean 'block_tokens'?"),
        (b"[kv]\nblock_tokens = 0\n", "kv.block_tokens=0"),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_where(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "phasor.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_file(file)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file") as caught:
        load_file(tmp_path / "none.toml")
    assert "none.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("1000000", 1_000_000),
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("2G", 2 * 10**9),
        (" 1.5 gib ", 3 * 2**29),
        ("1kB", 1000),
        ("4Ki", 4096),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, field="kv-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1G", "1 X", "GiB", "1e9", "nan", "1GiB1", "0.0MB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, field="kv-memory")
    assert (caught.value.field, caught.value.value) == ("kv-memory", text)
    assert "512MiB" in str(caught.value)


@pytest.mark.parametrize("port", [0, 9100, "off", "9100"])
def test_a_metrics_port_is_a_port_or_off(port: object) -> None:
    assert build(RouterConfig, {"metrics_port": port}).metrics_port in (0, 9100, "off")


@pytest.mark.parametrize("port", [-1, 65536, "none", "", True, 1.5, None])
def test_another_metrics_port_is_refused_with_the_way_out(port: object) -> None:
    expected = f"metrics_port={port!r}: give a port, 0 for a free one, or off"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        build(RouterConfig, {"metrics_port": port})


@pytest.mark.parametrize(("router", "worker"), [(9100, 0), (0, 0), ("off", "off")])
def test_workers_take_free_metrics_ports_or_none_and_the_routers_log_format(
    router: object, worker: object
) -> None:
    tree = build(ServingConfig, {"router": {"metrics_port": router, "log_format": "json"}})
    for role in ("prefill", "decode"):
        config = tree.worker(role)  # type: ignore[arg-type]
        assert (config.metrics_port, config.log_format) == (worker, "json")
