"""The whole configuration as one frozen tree, read once at start and passed down.

Unknown keys are errors that name the nearest known one. Nothing below the command line reads the environment.
"""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from phasor.core.errors import ConfigError
from phasor.core.logs import LogFormat

Seconds = Annotated[float, Field(gt=0, le=3600)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _check_metrics_port(value: object) -> object:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number != "off" and not (type(number) is int and 0 <= number <= 65535):
        raise ValueError("give a port, 0 for a free one, or off")
    return number


MetricsPort = Annotated[int | Literal["off"], BeforeValidator(_check_metrics_port)]
"""Where Prometheus reads a process; 0 takes a free port, "off" serves nothing."""

_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*$", re.IGNORECASE)
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class Section(BaseModel):
    """A frozen part of the tree that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Which model, and in which arithmetic."""

    path: str = "smollm2"
    """A folder, a short name (`phasor model list`) or a Hugging Face Hub id."""
    served_name: str = ""
    """The name clients use; empty takes the last part of `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt plus reply in tokens; by default the model's own limit."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Compute threads per worker. One is fastest on cores that are shared."""


class KVConfig(Section):
    """The paged KV pool of one worker."""

    memory_bytes: Annotated[int, Field(gt=0)] = 512 * 2**20
    """Bytes for the pool; the number of blocks follows from it (`--kv-memory`)."""
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per block; the same on every worker of a deployment."""


class SchedulerConfig(Section):
    """Limits of one worker's continuous batch."""

    max_step_tokens: Annotated[int, Field(ge=1)] = 512
    """Token budget of one step, prompt chunks and decoded tokens together."""
    max_running: Annotated[int, Field(ge=1)] = 32
    """Sequences in the batch at most."""
    max_waiting: Annotated[int, Field(ge=1)] = 256
    """Requests waiting for room at most; more are refused."""


class TransportConfig(Section):
    """How pages travel between workers."""

    kind: Literal["gloo", "nccl"] = "gloo"
    timeout_s: Seconds = 5.0
    """A link whose other end is silent for this long is torn down."""
    host: str = "127.0.0.1"
    """The address of this worker's own end of links (rendezvous store)."""


class WorkerConfig(Section):
    """One prefill or decode worker process."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transport: TransportConfig = TransportConfig()
    host: str = "127.0.0.1"
    port: Port = 0
    """gRPC port; 0 takes a free one."""
    metrics_port: MetricsPort = 0
    """Port of /metrics; 0 takes a free one, "off" serves none."""
    log_format: LogFormat = "text"
    """Lines for people ("text", logfmt) or for programs ("json")."""


class RouterConfig(Section):
    """The edge that clients talk to."""

    host: str = "127.0.0.1"
    port: Port = 50051
    local_prefill_tokens: Annotated[int, Field(ge=0)] = 0
    """Prompts up to this long are read by the decode worker itself; 0 sends all to prefill workers."""
    default_timeout_s: Seconds = 300.0
    """Deadline of a request that names none."""
    dispatch_timeout_s: Seconds = 5.0
    """How long a worker may take to answer that it admitted a request, once it has room."""
    max_in_flight: Annotated[int, Field(ge=1)] = 512
    """Requests inside Phasor at most; more are refused."""
    metrics_port: MetricsPort = 0
    """Port of /metrics; 0 takes a free one, "off" serves none. Under `phasor serve` "off" is for workers too."""
    log_format: LogFormat = "text"
    """Lines for people ("text", logfmt) or for programs ("json"). Under `phasor serve` workers follow."""


class FleetConfig(Section):
    """What `phasor serve` starts."""

    num_prefill: Annotated[int, Field(ge=0)] = 1
    num_decode: Annotated[int, Field(ge=1)] = 1
    cpus_per_worker: Annotated[float, Field(ge=0)] = 1.0
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    ray_address: str = ""
    """A running cluster ("auto" or host:port); empty starts Ray on this machine."""
    start_timeout_s: Seconds = 300.0


class ServingConfig(Section):
    """The whole tree: what a TOML file may hold, and what flags override."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    prefill: SchedulerConfig = SchedulerConfig()
    decode: SchedulerConfig = SchedulerConfig()
    router: RouterConfig = RouterConfig()
    transport: TransportConfig = TransportConfig()
    fleet: FleetConfig = FleetConfig()

    def worker(self, role: Literal["prefill", "decode"]) -> WorkerConfig:
        """Return the configuration of one worker of `role`."""
        return WorkerConfig(
            model=self.model,
            kv=self.kv,
            scheduler=self.prefill if role == "prefill" else self.decode,
            transport=self.transport,
            host=self.transport.host,
            # Several workers may share a host: each takes a free port and says which.
            metrics_port="off" if self.router.metrics_port == "off" else 0,
            log_format=self.router.log_format,
        )


SectionT = TypeVar("SectionT", bound=Section)


def build(cls: type[SectionT], values: dict[str, Any], *, source: str = "") -> SectionT:
    """Validate `values` into `cls`, turning pydantic's report into one sentence about one field.

    Args:
        cls: the section to build.
        values: nested plain values, as from TOML.
        source: where they came from, for the message.

    Raises:
        ConfigError: naming the first wrong field, its value and what would work.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        hint = message[:1].lower() + message[1:]
        if first["type"] == "extra_forbidden":
            hint = "unknown key" + _nearest(cls, first["loc"])
        if source:
            hint += f" (in {source})"
        raise ConfigError(name, first.get("input"), hint) from exc


def load_file(path: Path) -> ServingConfig:
    """Read a TOML configuration file.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown key or a wrong value.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError("config", str(path), "no such file") from exc
    except OSError as exc:
        raise ConfigError("config", str(path), f"cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError("config", str(path), f"not a TOML file: {exc}") from exc
    return build(ServingConfig, values, source=str(path))


def parse_bytes(text: str, *, field: str) -> int:
    """Return the bytes in "512MiB", "2G" or "1000000".

    Raises:
        ConfigError: `text` is not a size.
    """
    match = _BYTES.match(text)
    if match is None or float(match.group(1)) <= 0:
        raise ConfigError(field, text, 'give a positive size such as "512MiB" or "2GB"')
    return int(float(match.group(1)) * _UNITS[(match.group(2) or "").lower()])


def _nearest(cls: type[BaseModel], location: tuple[int | str, ...]) -> str:
    known: type[BaseModel] = cls
    for part in location[:-1]:
        annotation = known.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            known = annotation
    names = list(known.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(names)}"
