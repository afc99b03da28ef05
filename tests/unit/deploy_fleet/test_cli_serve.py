"""Flags to configuration; what `--help` and wrong values say. Nothing is started."""

import re

import pytest

from phasor.core.config import ServingConfig
from phasor.core.errors import ConfigError
from phasor.deploy import cli_serve
from phasor.deploy.cli import run
from phasor.deploy.cli_serve import serving_config

FILE = """
[model]
path = "/models/a"
[fleet]
num_decode = 3
[kv]
memory_bytes = 1000000
"""


def test_without_file_and_flags_the_defaults_hold():
    assert serving_config(None, {}) == ServingConfig()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "phasor.toml"
    path.write_text(FILE)
    config = serving_config(path, {"model": None, "decode": 2, "kv_memory": "2MiB", "max_step_tokens": 64})
    assert (config.model.path, config.fleet.num_decode, config.kv.memory_bytes) == ("/models/a", 2, 2 * 2**20)
    assert (config.prefill.max_step_tokens, config.decode.max_step_tokens) == (64, 64)
    assert config.router == ServingConfig().router


def test_every_flag_of_the_table_reaches_its_key():
    sections = ServingConfig.model_fields
    for key in cli_serve._FLAGS.values():
        section, name = key.split(".")
        assert name in sections[section].annotation.model_fields, key


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"decode": 0}, "fleet.num_decode=0: "),
        ({"dtype": "int3"}, "model.dtype='int3': "),
        ({"port": 70000}, "router.port=70000: "),
        ({"kv_memory": "lots"}, "--kv-memory='lots': give a positive size"),
        ({"gpus_per_worker": float("nan")}, "fleet.gpus_per_worker=nan: "),
    ],
)
def test_a_wrong_value_is_one_sentence_about_one_field(flags, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        serving_config(None, flags)


def test_help_teaches(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for text in ("phasor serve --ray-address auto --detach", "--kv-memory", "phasor chat", "50051"):
        assert text in shown
    assert run(["demo", "--help"]) == 0
    assert run(["fleet", "--help"]) == 0
    assert "stop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--tensor-parallel", "2"], "tensor_parallel=2: a worker has one rank"),
        (["serve", "--detach"], "fleet.ray_address='': --detach needs a running cluster"),
        (["serve", "--config", "/nowhere.toml"], "config='/nowhere.toml': no such file"),
        (["serve", "--prefill", "-1"], "fleet.num_prefill=-1: "),
        (["serve", "--device", "cuda"], "fleet.gpus_per_worker=0"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(args, message, capsys):
    assert run(args) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"phasor: error: {message}")
    assert said.count("\n") == 1
