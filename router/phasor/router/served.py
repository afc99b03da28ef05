"""The one model that a router serves: its limits and tokenizer, as its workers describe them.

Follows the registry: the tokenizer is loaded when the first worker has described itself, and again when the
fleet changes to another model.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from phasor.core.errors import ConfigError, WorkerLostError
from phasor.router.registry import Registry
from phasor.router.tokenizer import ModelTokenizer
from phasor.router.validation import ModelLimits
from phasor.v1 import inference_pb2, worker_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    folder: str
    weights_digest: str
    tokenizer: ModelTokenizer


class ServedModel:
    """What clients' requests are checked and tokenised against. `close` it.

    Args:
        registry: whose reference description names the model.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._loaded: _Loaded | None = None
        self._failed: tuple[str, str] | None = None
        self._problem = "no worker has described itself yet"

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: a decode worker is ready and the tokenizer is loaded."""
        return self._loaded is not None and bool(self._registry.descriptions("decode"))

    @property
    def description(self) -> worker_pb2.WorkerDescription:
        """The description that all used workers share the identity of.

        Raises:
            WorkerLostError: there is no worker, or the tokenizer could not be loaded; says which.
        """
        reference = self._registry.reference
        if reference is None:
            raise WorkerLostError(f"no model is served: {self._not_reached()}")
        return reference

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer; valid until the fleet changes to another model.

        Raises:
            WorkerLostError: as `description`.
        """
        reference = self.description
        if self._loaded is None or self._loaded.weights_digest != reference.identity.weights_digest:
            raise WorkerLostError(f"model {reference.served_name!r} is not served yet: {self._problem}")
        return self._loaded.tokenizer

    def limits(self) -> ModelLimits:
        """Return what bounds a request now: what every usable decode worker can do.

        Raises:
            WorkerLostError: no decode worker is usable, or as `tokenizer`.
        """
        reference, tokenizer = self.description, self.tokenizer
        workers = self._registry.descriptions("decode")
        if not workers:
            raise WorkerLostError(f"no decode worker is ready: {self._not_reached()}")
        return ModelLimits(
            served_name=reference.served_name,
            max_model_len=min(worker.max_model_len for worker in workers),
            vocab_size=tokenizer.vocab_size,
            max_pool_tokens=max(worker.num_blocks * worker.identity.block_tokens for worker in workers),
            max_running=max(worker.max_running for worker in workers),
            block_tokens=reference.identity.block_tokens,
        )

    def card(self) -> inference_pb2.ModelCard:
        """Return the model as ListModels shows it; raises as `description`."""
        reference = self.description
        return inference_pb2.ModelCard(
            name=reference.served_name,
            max_model_len=reference.max_model_len,
            dtype=reference.dtype,
            weights_digest=reference.identity.weights_digest,
        )

    async def refresh(self) -> None:
        """Load the tokenizer if the reference names another model than the loaded one.

        A folder that cannot be read raises nothing: the model is not ready then, and requests are told why.
        """
        reference = self._registry.reference
        if reference is None:
            return
        wanted = (reference.model_folder, reference.identity.weights_digest)
        have = (self._loaded.folder, self._loaded.weights_digest) if self._loaded else None
        if wanted in (have, self._failed):
            return
        try:
            tokenizer = await asyncio.to_thread(ModelTokenizer, Path(reference.model_folder))
        except ConfigError as exc:
            self._failed, self._problem = wanted, str(exc)
            _log.error("the tokenizer of %r cannot be loaded: %s", reference.served_name, exc)
            return
        self.close()
        self._failed = None
        self._loaded = _Loaded(*wanted, tokenizer)
        _log.info("serving model %r, tokenizer from %s", reference.served_name, reference.model_folder)

    def close(self) -> None:
        """Let the tokenizer's threads go. Idempotent."""
        if self._loaded is not None:
            self._loaded.tokenizer.close()
            self._loaded = None

    def _not_reached(self) -> str:
        workers = [
            f"{w.ref.role} {w.ref.address} ({w.why_not or 'ready'})" for w in self._registry.snapshots()
        ]
        return f"looked at {', '.join(workers)}" if workers else "the router has no workers"
