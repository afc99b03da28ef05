"""The command line of one worker process, the same for both roles; no Ray.

Prints one JSON line when the worker is ready, so that whoever started it can read where it listens.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from phasor.core.config import WorkerConfig, build, parse_bytes
from phasor.core.errors import PhasorError
from phasor.core.logs import configure_logging
from phasor.engine.service import WorkerService

EXIT_BAD_INPUT = 2


def run_worker(cls: type[WorkerService], prog: str, argv: Sequence[str] | None = None) -> int:
    """Run a worker until SIGINT or SIGTERM.

    Args:
        cls: PrefillWorker or DecodeWorker.
        prog: the program's name in its help.
        argv: arguments; the process's own by default.

    Returns:
        the exit status: 0, or 2 with one line on standard error.
    """
    args = _parser(prog).parse_args(argv)
    configure_logging(args.log_format)
    try:
        return asyncio.run(_serve(cls, _config(args)))
    except PhasorError as exc:
        sys.stderr.write(f"{prog}: error: {exc}\n")
        return EXIT_BAD_INPUT


async def _serve(cls: type[WorkerService], config: WorkerConfig) -> int:
    worker = cls(config)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        address = await worker.start()
        ready = {
            "address": address,
            "incarnation": worker.incarnation,
            "metrics_address": worker.metrics_address,
        }
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await worker.stop()
    return 0


def _config(args: argparse.Namespace) -> WorkerConfig:
    model: dict[str, Any] = {
        "path": args.model,
        "served_name": args.served_name,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "device": args.device,
        "num_threads": args.threads,
    }
    kv: dict[str, Any] = {"block_tokens": args.block_tokens}
    if args.kv_memory:
        kv["memory_bytes"] = parse_bytes(args.kv_memory, field="--kv-memory")
    values = {
        "model": model,
        "kv": kv,
        "scheduler": {
            "max_step_tokens": args.max_step_tokens,
            "max_running": args.max_running,
            "max_waiting": args.max_waiting,
        },
        "transport": {"kind": args.transport, "timeout_s": args.transport_timeout, "host": args.host},
        "host": args.host,
        "port": args.port,
        "metrics_port": args.metrics_port,
        "log_format": args.log_format,
    }
    return build(WorkerConfig, values)


def _parser(prog: str) -> argparse.ArgumentParser:
    defaults = WorkerConfig()
    parser = argparse.ArgumentParser(
        prog=prog, description="Run one worker. Prints a JSON line with its address when it is ready."
    )
    add = parser.add_argument
    add("--model", default=defaults.model.path, help="folder, short name or Hub id (default: %(default)s)")
    add("--served-name", default="", help="the name clients use (default: the last part of --model)")
    add("--dtype", default=defaults.model.dtype, help="float32, bfloat16 or float16 (default: %(default)s)")
    add("--device", default=defaults.model.device, help="cpu or cuda (default: %(default)s)")
    add(
        "--max-model-len",
        type=int,
        default=None,
        help="longest prompt plus reply in tokens (default: the model's)",
    )
    add("--kv-memory", default="", help='bytes for the KV pool, such as "512MiB"')
    add(
        "--block-tokens",
        type=int,
        default=defaults.kv.block_tokens,
        help="tokens per block (default: %(default)s)",
    )
    add(
        "--max-step-tokens",
        type=int,
        default=defaults.scheduler.max_step_tokens,
        help="token budget of one step",
    )
    add(
        "--max-running",
        type=int,
        default=defaults.scheduler.max_running,
        help="sequences in the batch at most",
    )
    add(
        "--max-waiting",
        type=int,
        default=defaults.scheduler.max_waiting,
        help="requests that wait for room at most; more are refused",
    )
    add(
        "--threads",
        type=int,
        default=defaults.model.num_threads,
        help="compute threads (default: %(default)s)",
    )
    add("--transport", default=defaults.transport.kind, help="gloo or nccl (default: %(default)s)")
    add(
        "--transport-timeout",
        type=float,
        default=defaults.transport.timeout_s,
        help="seconds a link may be silent",
    )
    _add_addresses(parser, defaults)
    return parser


def _add_addresses(parser: argparse.ArgumentParser, defaults: WorkerConfig) -> None:
    add = parser.add_argument
    add("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=defaults.port, help="port to listen on; 0 takes a free one")
    add(
        "--metrics-port",
        default="0",
        help="port of /metrics for Prometheus; 0 takes a free one, off serves none (default: %(default)s)",
    )
    add("--log-format", choices=["text", "json"], default="text", help="(default: %(default)s)")
