"""A Ray of our own on this machine: light, private, and gone without a trace when we stop it.

It listens on 127.0.0.1 only, on ports the kernel chooses, in a private folder with its own token, so that
several `phasor serve` and other people's Ray live side by side. Never `ray stop`: that ends every Ray on the
machine.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from phasor.core.errors import ConfigError, WorkerLostError
from phasor.deploy.ray_calls import in_thread

NAMESPACE = "phasor"
"""The Ray namespace of every named actor of ours."""

# Ray refuses less than 75 MB. Only arguments and results of small calls go there.
_OBJECT_STORE_BYTES = 80_000_000
_START_TIMEOUT_S = 90.0  # 3 to 6 s on a quiet machine, 16 s at load 25 (facts/ray.md section 1)
_STOP_TIMEOUT_S = 15.0
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

_log = logging.getLogger(__name__)


def node_environment(token_path: Path) -> dict[str, str]:
    """Return the settings that Ray's processes of our own cluster start with, and its drivers too."""
    return {
        # Explicit: Ray turns authentication on by itself in some cases, and a mixed state aborts with a
        # stack trace.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        # `ray start` turns 127.0.0.1 into the machine's outward address unless it believes that it cannot
        # form clusters; then it, its servers and its drivers use the loopback interface alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_START_HOOK": "phasor.deploy.ray_guard.drop_client_server",
        # SIGTERM means stop now: the fleet has drained its own workers already.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Two cores are usual here, and Ray would warn about (or kill workers over) memory that the pools
        # need.
        "RAY_memory_monitor_refresh_ms": "0",
    }


class LocalRay:
    """One Ray head on this machine, started and stopped by us.

    Args:
        num_cpus: logical CPUs to announce, whatever the machine has: 1P+1D must fit on one core.
        num_gpus: GPUs to announce.
    """

    def __init__(self, *, num_cpus: int, num_gpus: int = 0) -> None:
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self.address = ""

    @property
    def folder(self) -> Path:
        """The private folder: token, Ray's sockets and logs. Removed by `stop`."""
        assert self._folder is not None, "start() first"
        return self._folder

    @property
    def pids(self) -> frozenset[int]:
        """Every process of this Ray that lives now, workers and actors among them."""
        return frozenset(process.pid for process in self._family())

    async def start(self, *, timeout_s: float = _START_TIMEOUT_S) -> str:
        """Start the head node and return its address. Cleans up after itself when it fails.

        Raises:
            WorkerLostError: Ray ended, or was not ready in time; the message carries its last lines.
        """
        assert self._process is None, "one LocalRay starts once"
        # mkdtemp gives 0700. Ray makes its own folder 0777, which is why that one lies inside. /tmp and not
        # TMPDIR: the path of a unix socket may have 107 bytes, and Ray's take about 70.
        self._folder = Path(tempfile.mkdtemp(prefix="phasor-", dir="/tmp"))
        token_path = self._folder / "token"
        token_path.touch(mode=0o600)
        token_path.write_text(secrets.token_hex(32), encoding="ascii")
        self._spawn(token_path)
        try:
            self.address = await self._wait_for_address(timeout_s)
        except BaseException:
            await self.stop()
            raise
        return self.address

    def environment(self) -> dict[str, str]:
        """Return what a driver of this Ray needs in its environment before it imports ray."""
        return node_environment(self.folder / "token")

    async def stop(self) -> list[int]:
        """End every process of this Ray and remove its folder. Idempotent.

        Returns:
            Pids that are still alive after SIGKILL: always empty, unless the kernel holds a process.
        """
        process, self._process = self._process, None
        left: list[int] = []
        if process is not None:
            family = self._family_of(process.pid)
            # Leader first: its SIGTERM handler ends gcs and raylet in order, and the raylet its workers.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            left = await asyncio.to_thread(_reap, process, family)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        return left

    def kill(self) -> None:
        """End every process of this Ray with SIGKILL and remove its folder, unwaited: a last resort."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, token_path: Path) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        ray_folder = self.folder / "ray"
        ray_folder.mkdir()
        command = [sys.executable, "-m", "phasor.deploy.ray_guard", str(self.folder)]
        command += ["start", "--head", "--block"]
        command += [
            "--port=0",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={ray_folder}",
            f"--num-cpus={self._num_cpus}",
            f"--num-gpus={self._num_gpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--include-dashboard=False",
            "--no-monitor",
            "--include-log-monitor=False",
            # Fixed defaults (10002-19999, 52365) would collide with another Ray on this machine.
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
        ]
        with (self.folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # held open for life: see ray_guard
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **node_environment(token_path), "PYTHONUNBUFFERED": "1"},
                # A Ctrl-C in the terminal is for us: Ray must live until we have drained it.
                start_new_session=True,
            )

    async def _wait_for_address(self, timeout_s: float) -> str:
        process = self._process
        assert process is not None
        address_file = self.folder / "ray" / "ray_current_cluster"
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise WorkerLostError(
                    f"Ray ended while starting (exit code {process.returncode}): {self._log_tail()}"
                )
            # `ray start` writes it last, when everything runs.
            if address_file.exists() and (text := address_file.read_text(encoding="ascii").strip()):
                return text
            await asyncio.sleep(0.05)
        raise WorkerLostError(f"Ray was not ready within {timeout_s:g} s: {self._log_tail()}")

    def _log_tail(self) -> str:
        try:
            lines = (self.folder / "start.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return "(no output)"
        return " | ".join(line.strip() for line in lines[-3:]) or "(no output)"

    def _family(self) -> list[psutil.Process]:
        return self._family_of(self._process.pid) if self._process is not None else []

    @staticmethod
    def _family_of(pid: int) -> list[psutil.Process]:
        # By parent, and by session too: a worker whose raylet is gone is adopted by init.
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(pid)
            found = {process.pid: process for process in [leader, *leader.children(recursive=True)]}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == pid:
                    found[process.pid] = process
        return list(found.values())


def _reap(leader: "subprocess.Popen[bytes]", family: list[psutil.Process]) -> list[int]:
    """Wait for the processes to end, then kill what is left. Blocks for up to `_STOP_TIMEOUT_S` + 2 s."""
    session = leader.pid
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(_STOP_TIMEOUT_S / 2)
    psutil.wait_procs(family, timeout=_STOP_TIMEOUT_S / 2)
    late = {p.pid: p for p in [*LocalRay._family_of(session), *(q for q in family if q.is_running())]}
    for process in late.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(list(late.values()), timeout=2.0)
    if leader.stdin is not None:
        leader.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(1.0)
    return [process.pid for process in alive]


async def connect(address: str, *, environment: dict[str, str], timeout_s: float = _START_TIMEOUT_S) -> None:
    """Make this process a driver of the Ray at `address`, with `environment` added to its own.

    Args:
        address: host:port of the GCS, or "auto".
        environment: settings that must be there before Ray's library reads them.
        timeout_s: `ray.init` to a dead address hangs for minutes; this is how long we wait.

    Raises:
        ConfigError: nothing answers at `address`, or it refuses our token.
    """
    if environment:
        assert "ray" not in sys.modules, "Ray reads its environment on import: connect() must come first"
        for name in _TOKEN_VARIABLES:
            os.environ.pop(name, None)  # an operator's token for another cluster would win over ours
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", **environment})
    import ray

    def init() -> None:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)

    try:
        await in_thread(init, timeout_s=timeout_s, what=f"connecting to Ray at {address}")
    except (ConnectionError, RuntimeError, ValueError, WorkerLostError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(
            "fleet.ray_address",
            address,
            f"cannot join this Ray: {reason}; leave it empty to start Ray on this machine, and see that "
            "RAY_AUTH_MODE and the token are those of the cluster",
        ) from exc


async def num_hosts() -> int:
    """Return how many hosts of the cluster are alive."""
    import ray

    def count() -> int:
        return sum(bool(node["Alive"]) for node in ray.nodes())

    return await in_thread(count, timeout_s=10.0, what="counting the cluster's hosts")


async def disconnect(*, timeout_s: float = 10.0) -> None:
    """Stop being a driver. Never raises: the cluster may be gone already."""
    import ray

    with contextlib.suppress(WorkerLostError):
        await in_thread(ray.shutdown, timeout_s=timeout_s, what="leaving Ray")
