"""`phasor chat`, `generate` and `info` in front of a real gRPC server."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from phasor.deploy import cli
from tests.helpers.fake_inference import FakeInference, fake_server

WAIT_S = 20.0
USAGE = "7 prompt tokens (4 cached)"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeInference]:
    with fake_server() as server:
        yield server


@pytest.fixture
def server(shared_server: FakeInference, monkeypatch: pytest.MonkeyPatch) -> FakeInference:
    shared_server.requests.clear()
    shared_server.released.clear()
    monkeypatch.setenv("PHASOR_ADDRESS", shared_server.address)
    monkeypatch.setenv("COLUMNS", "250")
    return shared_server


def test_one_question_streams_the_answer_and_puts_the_cost_beside_it(
    server: FakeInference, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(
            ["chat", "--system", "be brief", "--max-tokens", "9", "--stop", "a", "--stop", "b", "good day"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out == "good day\n" and err.startswith(USAGE) and err.count("\n") == 1
    (request,) = server.requests
    assert [(m.role, m.content) for m in request.messages] == [("system", "be brief"), ("user", "good day")]
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (9, ["a", "b"])
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0.0
    assert not request.sampling.HasField("seed")


def test_a_message_may_come_through_a_pipe(
    server: FakeInference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert cli.run(["chat"]) == 0
    assert capsys.readouterr().out == "from a pipe\n"


def test_generate_continues_a_text(
    server: FakeInference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", "a b c", "--seed", "5", "--ignore-eos", "-t", "0.5", "--timeout", "7"]) == 0
    out, err = capsys.readouterr()
    assert out == "a b c\n" and err.startswith(USAGE)
    sampling = server.requests[0].sampling
    assert (sampling.seed, sampling.ignore_eos, sampling.temperature) == (5, True, 0.5)
    assert server.requests[0].timeout_s == 7.0
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped text"))
    assert cli.run(["generate", "-"]) == 0
    assert capsys.readouterr().out == "piped text\n"


@pytest.mark.parametrize(
    ("arguments", "text", "hint"),
    [
        (["chat", "refuse"], "", "temperature=-1.0: must be 0 or more"),
        (["generate", "--model", "other", "x"], "", "model='other' is not served here"),
        (["generate", "lost"], "lost\n", "decode worker 1234 fell silent"),
        (["generate", "truncate"], "truncate\n", "ended without its last message"),
    ],
)
def test_what_the_server_refuses_is_one_line_after_what_had_arrived(
    server: FakeInference, arguments: list[str], text: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == text
    assert err.startswith("phasor: error: ") and hint in err and err.count("\n") == 1


def test_info_as_tables_and_as_json(server: FakeInference, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["info"]) == 0
    out = capsys.readouterr().out
    for text in (
        f"Phasor 9.9 at {server.address}",
        "256 tokens",
        "theta 10000",
        "healthy",
        "lost",
        "60/64",
        "5000.0 MB",
    ):
        assert text in out
    assert cli.run(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["workers"][1]["counts"]["num_free_blocks"] == 60 and info["model"]["name"] == "fake"


class Terminal:
    """`phasor` on a pseudo terminal, as a person sees it."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        # A session of its own with this terminal, so that Ctrl-C typed here reaches it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while text not in self.seen:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {text!r} on the terminal: {self.seen!r}"
            if select.select([self._ours], [], [], left_s)[0]:
                self.seen += os.read(self._ours, 65536).decode()
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        os.close(self._ours)


_ON_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from phasor.deploy import cli
sys.exit(cli.run(sys.argv[1:]))
"""


@pytest.fixture
def terminal(server: FakeInference) -> Iterator[Terminal]:
    terminal = Terminal("chat")
    yield terminal
    terminal.close()


def test_a_conversation_remembers_survives_errors_and_ends_with_ctrl_d(
    server: FakeInference, terminal: Terminal
) -> None:
    terminal.wait_for(f"fake at {server.address}")
    terminal.wait_for("> ")
    terminal.type("first question\n")
    terminal.wait_for(USAGE)
    terminal.wait_for("> ")
    terminal.type("refuse\n")
    terminal.wait_for("phasor: error: temperature=-1.0")
    terminal.wait_for("> ")
    terminal.type("hang\n")
    terminal.wait_for("hang\r\n")  # what was typed
    terminal.wait_for("hang")  # the answer so far
    terminal.type("\x03")
    terminal.wait_for("stopped")
    assert server.released.wait(WAIT_S)
    terminal.wait_for("> ")
    terminal.type("last question\n")
    terminal.wait_for(USAGE)
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(WAIT_S) == 0
    turns = [(m.role, m.content) for m in server.requests[-1].messages]
    assert turns == [
        ("user", "first question"),
        ("assistant", "first question"),
        ("user", "hang"),
        ("assistant", "hang"),
        ("user", "last question"),
    ]


def test_ctrl_c_at_the_prompt_ends_with_130(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    # Between showing the prompt and waiting for input, Python's readline notes a signal but sleeps on: type on.
    for _ in range(20):
        terminal.type("\x03")
        try:
            assert terminal.process.wait(1.0) == 130
            return
        except subprocess.TimeoutExpired:
            continue
    pytest.fail("Ctrl-C does not end the prompt")


def test_a_models_escape_sequences_do_not_reach_the_terminal(server: FakeInference) -> None:
    terminal = Terminal("generate", "red \x1b[31malert")
    try:
        terminal.wait_for("red \N{REPLACEMENT CHARACTER}[31malert")
    finally:
        terminal.close()
