"""The prefill worker as a Ray actor: a thin shell that starts, watches and stops it.

No request passes through here: routers and peers speak gRPC to the address that `start` returns. The class
does not import Ray, and torch only inside `start`, so that the fleet can name it without paying for either.
"""

import asyncio
from typing import TYPE_CHECKING

from phasor.core.config import WorkerConfig
from phasor.core.errors import WorkerLostError
from phasor.core.ids import Incarnation
from phasor.core.logs import configure_logging

if TYPE_CHECKING:
    from phasor.prefill_worker.worker import PrefillWorker


class PrefillActor:
    """One prefill worker. The fleet makes it an actor with `ray.remote`.

    Args:
        config: the worker's configuration, with a model folder that exists on the host it is placed on.
    """

    def __init__(self, config: WorkerConfig) -> None:
        configure_logging(config.log_format)
        self._config = config
        self._worker: PrefillWorker | None = None

    async def start(self) -> tuple[str, Incarnation]:
        """Load the model, pass the canary, and return host:port and the incarnation.

        Raises:
            ConfigError: this worker can never start like this (model, memory, port).
        """
        assert self._worker is None, "one actor is one incarnation: it starts once"
        from phasor.prefill_worker.worker import PrefillWorker

        self._worker = PrefillWorker(self._config)
        address = await self._worker.start()
        return address, self._worker.incarnation

    async def ping(self, hold_s: float) -> Incarnation:
        """Answer with the incarnation after `hold_s` seconds.

        The fleet always has one ping in flight, so that Ray reports this process's death at once and not with
        the next question.

        Raises:
            WorkerLostError: the worker is not serving any more.
        """
        await asyncio.sleep(hold_s)
        if self._worker is None or not self._worker.description().ready:
            raise WorkerLostError("the prefill worker is not ready")
        return self._worker.incarnation

    async def stop(self, grace_s: float) -> None:
        """Let running requests end for up to `grace_s` seconds, then free everything. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop(grace_s=grace_s)
