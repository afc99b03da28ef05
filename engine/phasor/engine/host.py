"""A loaded engine: the model, its pool sized from a memory budget, and proof that it generates.

Built once per worker process, in a thread (loading blocks for seconds); then owned by the engine thread.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from phasor.core.config import WorkerConfig
from phasor.core.errors import ConfigError, InternalError
from phasor.core.identity import Identity
from phasor.engine.blocks import BlockPool
from phasor.engine.kv import PagedKV, num_blocks_for_budget
from phasor.engine.model import LoadedModel, load_model
from phasor.engine.model_source import resolve_model
from phasor.engine.pages import PageLayout
from phasor.engine.runner import ModelRunner, SequenceSlice

_log = logging.getLogger(__name__)

_CANARY_PROMPT_TOKENS = 5
_CANARY_NEW_TOKENS = 3


@dataclass(slots=True, kw_only=True)
class EngineHost:
    """Everything one worker computes with. `pool` and `kv` describe the same blocks."""

    folder: Path
    served_name: str
    model: LoadedModel
    layout: PageLayout
    identity: Identity
    kv: PagedKV
    pool: BlockPool
    runner: ModelRunner
    max_model_len: int


def load_engine(config: WorkerConfig) -> EngineHost:
    """Load the model and size the pool. Blocks for seconds; sets the process's compute threads.

    Raises:
        ConfigError: no such model, an unsupported one, a limit beyond the model's, or too little memory.
    """
    torch.set_num_threads(config.model.num_threads)
    # A worker's standard error is a log, not a terminal.
    transformers_logging.disable_progress_bar()
    folder = resolve_model(config.model.path)
    model = load_model(folder, dtype=config.model.dtype, device=config.model.device)
    layout = model.layout_for(config.kv.block_tokens)
    max_model_len = _max_model_len(config, model)
    num_blocks = _num_blocks(config, layout, max_model_len)
    kv = PagedKV(layout, num_blocks, device=config.model.device)
    host = EngineHost(
        folder=folder,
        served_name=config.model.served_name or Path(config.model.path).name,
        model=model,
        layout=layout,
        identity=model.identity(config.kv.block_tokens),
        kv=kv,
        pool=BlockPool(num_blocks, config.kv.block_tokens),
        runner=ModelRunner(model, kv),
        max_model_len=max_model_len,
    )
    run_canary(host)
    _log.info("%s", describe_pool(host))
    return host


def describe_pool(host: EngineHost) -> str:
    """Return one line that says how large the pool is and how that was derived."""
    num_tokens = host.pool.num_blocks * host.layout.block_tokens
    return (
        f"KV pool: {host.pool.num_blocks} blocks of {host.layout.block_tokens} tokens "
        f"({host.layout.block_bytes:,} bytes each, {host.layout.token_bytes:,.0f} per token) = {num_tokens:,} tokens, "
        f"{num_tokens / host.max_model_len:.1f} sequences of {host.max_model_len:,}"
    )


def run_canary(host: EngineHost) -> None:
    """Generate a few tokens through the pool; a worker that cannot is never ready.

    Raises:
        InternalError: the model produced NaN or infinity.
    """
    length = min(_CANARY_PROMPT_TOKENS, host.max_model_len - _CANARY_NEW_TOKENS)
    tokens = [index % host.model.vocab_size for index in range(1, max(1, length) + 1)]
    blocks = host.pool.allocate(host.layout.num_blocks_for(len(tokens) + _CANARY_NEW_TOKENS))
    try:
        num_computed = 0
        for _ in range(_CANARY_NEW_TOKENS):
            logits = host.runner.step([SequenceSlice(tokens[num_computed:], num_computed, blocks, True)])
            if not bool(torch.isfinite(logits).all()):
                raise InternalError(
                    f"the model at {host.folder} produced NaN or infinity for tokens {tokens}"
                )
            num_computed = len(tokens)
            tokens.append(int(logits[0].argmax()))
    finally:
        host.pool.free_blocks(blocks)


def _max_model_len(config: WorkerConfig, model: LoadedModel) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return model.max_positions
    if wanted > model.max_positions:
        hint = (
            f"the model's limit is {model.max_positions} positions (trained on {model.rope.trained_positions}); "
            "lower --max-model-len"
        )
        raise ConfigError("model.max_model_len", wanted, hint)
    return wanted


def _num_blocks(config: WorkerConfig, layout: PageLayout, max_model_len: int) -> int:
    num_blocks = num_blocks_for_budget(layout, config.kv.memory_bytes)
    needed = layout.num_blocks_for(max_model_len) + 1
    if num_blocks < needed:
        hint = (
            f"holds {max(0, num_blocks - 1) * layout.block_tokens} tokens, one sequence of "
            f"{max_model_len} takes {needed * layout.block_bytes:,} bytes; raise --kv-memory or lower --max-model-len"
        )
        raise ConfigError("kv.memory_bytes", config.kv.memory_bytes, hint)
    return num_blocks
