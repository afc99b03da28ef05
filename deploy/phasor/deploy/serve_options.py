"""The options of `phasor serve`, each explained once. Defaults stand in `phasor.core.config`, not here."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None, typer.Option(help="A folder, a short name such as smollm2, or a Hugging Face Hub id.")
]
ServedName = Annotated[str | None, typer.Option(help="The name clients use. (default: last part of --model)")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. (default: float32)")]
KVMemory = Annotated[
    str | None,
    typer.Option(help='KV pool of each worker, e.g. "512MiB"; the blocks follow. (default: 512MiB)'),
]
BlockTokens = Annotated[int | None, typer.Option(help="Tokens per KV block. (default: 16)")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus reply. (default: the model's limit)")
]
MaxStepTokens = Annotated[
    int | None, typer.Option(help="Token budget of one step of a worker. (default: 512)")
]
Prefill = Annotated[int | None, typer.Option(help="Workers that read prompts. (default: 1)")]
Decode = Annotated[int | None, typer.Option(help="Workers that write replies. (default: 1)")]
Threads = Annotated[int | None, typer.Option(help="Compute threads of each worker. (default: 1)")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. (default: cpu)")]
GpusPerWorker = Annotated[
    float | None, typer.Option(help="Share of a GPU for each worker; 0.5 lets two share. (default: 0)")
]
CpusPerWorker = Annotated[
    float | None, typer.Option(help="CPUs that Ray counts for each worker. (default: 1)")
]
TensorParallel = Annotated[int, typer.Option(help="Ranks per worker; only 1 in this version.")]
LocalPrefillTokens = Annotated[
    int | None, typer.Option(help="Prompts up to this long are read by decode workers. (default: 0)")
]
Transport = Annotated[str | None, typer.Option(help="How pages travel: gloo or nccl. (default: gloo)")]
WorkerHost = Annotated[
    str | None,
    typer.Option(help='Address that workers bind; "auto" is each host\'s own. (default: 127.0.0.1)'),
]
Host = Annotated[str | None, typer.Option(help="Address for clients. (default: 127.0.0.1)")]
Port = Annotated[int | None, typer.Option(help="Port for clients; 0 takes a free one. (default: 50051)")]
MetricsPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="Port where Prometheus reads the router; 0 takes a free one, as workers do; off serves none. (default: 0)",
    ),
]
LogFormat = Annotated[str | None, typer.Option(help="Log lines: text or json. (default: text)")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE.toml", help="Configuration file; flags win over it.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(help='A running Ray: "auto" or host:port. (default: a private one on this machine)'),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Stay in the cluster of --ray-address and return when ready.")
]
Replace = Annotated[
    bool, typer.Option("--replace", help="With --detach: end another deployment there first.")
]
StartTimeout = Annotated[
    float | None, typer.Option(help="Seconds for the workers to get ready. (default: 300)")
]
