"""The Inference service: every client request is counted, checked, tokenised and followed to its end here."""

import asyncio
import importlib.metadata
import logging
import secrets
from typing import Any

import grpc.aio

from phasor.core.clock import Clock
from phasor.core.config import RouterConfig
from phasor.core.errors import (
    CapacityError,
    InternalError,
    InvalidRequestError,
    PhasorError,
    RequestCancelledError,
)
from phasor.core.ids import RequestId
from phasor.core.logs import error_fields, log_event
from phasor.router import policy, validation
from phasor.router.execution import PreparedRequest, RequestExecution
from phasor.router.lifecycle import LifecycleLimits, RequestLifecycle
from phasor.router.lifecycle_events import Chosen, Event, Finish, Refused
from phasor.router.metrics import RequestRecord, RouterMetrics
from phasor.router.registry import Registry, worker_states
from phasor.router.served import ServedModel
from phasor.router.validation import ModelLimits
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc
from phasor.wire import status

_log = logging.getLogger(__name__)

LOCAL_PREFILL_METADATA = "phasor-local-prefill"
"""A client that sends this metadata key with the value "1" has the decode worker read the prompt itself."""

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceEdge(inference_pb2_grpc.InferenceServicer):
    """Answers clients.

    Args:
        config: limits of the router.
        registry: the workers.
        served: the model they serve.
        clock: where all of a request's times come from.
        validate: check every life cycle's invariants after every event (tests).
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        served: ServedModel,
        clock: Clock,
        *,
        validate: bool = False,
    ) -> None:
        self._config, self._registry, self._served, self._clock = config, registry, served, clock
        self._validate = validate
        self.metrics = RouterMetrics(
            num_in_flight=lambda: self._num_in_flight, workers=lambda: worker_states(registry)
        )
        self.metrics_address = ""
        """Where they are served, host:port; empty: nowhere."""
        self._num_in_flight = 0
        self._ids: set[RequestId] = set()

    @property
    def num_in_flight(self) -> int:
        """Generate and Chat calls that have not ended. 0 when idle."""
        return self._num_in_flight

    # Streams are written with context.write, not yielded: cancelling such a call runs its `finally` at once,
    # while a generator suspended at a yield would be closed when the garbage collector comes by.

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Continue a prompt."""
        async with status.errors_to_status(context):
            await self._serve(request, context)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        """Answer messages."""
        async with status.errors_to_status(context):
            await self._serve(request, context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the ids that Generate or Chat would read."""
        async with status.errors_to_status(context):
            limits = self._checked_limits(request.model)
            if request.WhichOneof("input") == "messages":
                ids = await self._tokenize_chat(request.messages.messages, limits)
            else:
                validation.check_text(request.text, limits, field="text")
                ids = await self._served.tokenizer.encode(request.text)
            return pb.TokenizeResponse(token_ids=ids)
        raise AssertionError("errors_to_status aborts the call")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of ids, special tokens included."""
        async with status.errors_to_status(context):
            limits = self._checked_limits(request.model)
            ids = validation.check_token_ids(request.token_ids, limits.vocab_size, field="token_ids")
            return pb.DetokenizeResponse(text=self._served.tokenizer.decode(ids))
        raise AssertionError("errors_to_status aborts the call")

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Return the served model; none while no worker has described itself."""
        known = self._registry.reference is not None
        return pb.ListModelsResponse(models=[self._served.card()] if known else [])

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return version, model, identity, rope and workers; model fields are unset without a worker."""
        counts = pb.RouterCounts(
            num_in_flight=self._num_in_flight,
            max_in_flight=self._config.max_in_flight,
            num_leases=self._registry.num_in_flight(),
        )
        response = pb.GetServerInfoResponse(
            version=_version(),
            workers=self._registry.summaries(),
            counts=counts,
            metrics_address=self.metrics_address,
        )
        reference = self._registry.reference
        if reference is not None:
            response.model.CopyFrom(self._served.card())
            response.identity.CopyFrom(reference.identity)
            response.rope.CopyFrom(reference.rope)
        return response

    # --- one request -------------------------------------------------------------------------------------

    async def _serve(self, request: pb.GenerateRequest | pb.ChatRequest, context: Context) -> None:
        """Count and log one Generate or Chat call, whatever its end; raises what it failed with."""
        arrived_s = self._clock.now_s()
        record = self.metrics.begin(arrived_s)
        try:
            finish = await self._accept(request, context, arrived_s, record)
        except PhasorError as exc:
            record.end("error", exc.grpc_code)
            fields: dict[str, str | float] = {**error_fields(exc), "total_s": self._clock.now_s() - arrived_s}
            log_event(_log, "failed", request_id=request.request_id, level=logging.WARNING, **fields)
            raise
        except asyncio.CancelledError:
            record.end("abort", RequestCancelledError.grpc_code)
            total_s = self._clock.now_s() - arrived_s
            log_event(_log, "failed", request_id=request.request_id, code="CANCELLED", total_s=total_s)
            raise
        finally:
            # Reached without an ending by a bug only; that is a request too.
            record.end("error", InternalError.grpc_code)
        _log_finish(request.request_id, finish)

    async def _accept(
        self,
        request: pb.GenerateRequest | pb.ChatRequest,
        context: Context,
        arrived_s: float,
        record: RequestRecord,
    ) -> Finish:
        """Hold a place for a call and follow it to its end. The drawn id is put into the request."""
        request_id = validation.check_request_id(request.request_id)
        if request_id in self._ids:
            raise InvalidRequestError(
                "request_id", request_id, "is already in use; wait for its end or use another"
            )
        if self._num_in_flight >= self._config.max_in_flight:
            raise CapacityError(
                f"the router is full: {self._num_in_flight} requests are in flight and max_in_flight is "
                f"{self._config.max_in_flight}; try again later, or raise --max-in-flight"
            )
        request.request_id = request_id
        self._num_in_flight += 1
        self._ids.add(request_id)
        try:
            finish = await self._follow(request_id, request, context, arrived_s, record)
            record.finished(finish.reply)
            return finish
        finally:
            self._num_in_flight -= 1
            self._ids.discard(request_id)

    async def _follow(
        self,
        request_id: RequestId,
        request: pb.GenerateRequest | pb.ChatRequest,
        context: Context,
        arrived_s: float,
        record: RequestRecord,
    ) -> Finish:
        given_s = request.timeout_s if request.HasField("timeout_s") else None
        timeout_s = validation.check_timeout_s(given_s, self._config.default_timeout_s)
        limits = self._checked_limits(request.model)
        field, ids = await self._read_input(request, limits)
        validation.check_prompt(ids, limits, field=field)
        shape, num_choices = validation.check_shape(
            request.sampling, can_echo=isinstance(request, pb.GenerateRequest)
        )
        sampling = validation.fill_sampling(
            request.sampling,
            len(ids),
            limits,
            draw_seed=lambda: secrets.randbits(64),
            num_choices=num_choices,
            num_returned=shape.num_returned,
        )
        prepared = PreparedRequest(
            request_id=request_id,
            token_ids=ids,
            sampling=sampling,
            shape=shape,
            prompt_text=self._prompt_text(request, ids) if shape.echo else "",
        )
        lifecycle = RequestLifecycle(
            request_id,
            prompt_tokens=len(ids),
            arrived_s=arrived_s,
            deadline_s=arrived_s + timeout_s,
            limits=LifecycleLimits(dispatch_timeout_s=self._config.dispatch_timeout_s),
            validate=self._validate,
        )
        log_event(
            _log, "accepted", request_id=request_id, prompt_tokens=len(ids), max_tokens=sampling.max_tokens
        )
        execution = RequestExecution(
            prepared,
            lifecycle=lifecycle,
            registry=self._registry,
            write=context.write,
            clock=self._clock,
            record=record,
        )
        return await execution.run(self._choose(prepared, context))

    def _choose(self, request: PreparedRequest, context: Context) -> Event:
        now_s, prompt_tokens = self._clock.now_s(), len(request.token_ids)
        metadata = dict(context.invocation_metadata() or ())
        try:
            choice = policy.choose(
                self._registry.snapshots(),
                prompt_tokens=prompt_tokens,
                total_tokens=prompt_tokens + request.sampling.max_tokens,
                local_prefill_tokens=self._config.local_prefill_tokens,
                force_local=metadata.get(LOCAL_PREFILL_METADATA) == "1",
            )
        except PhasorError as exc:
            return Refused(now_s=now_s, error=exc)
        if choice.is_fallback:
            _log.warning(
                "request %s: the decode worker reads the prompt: %s", request.request_id, choice.why_local
            )
        return Chosen(now_s=now_s, decode=choice.decode, prefill=choice.prefill)

    # --- checking and tokenising -------------------------------------------------------------------------

    def _checked_limits(self, model: str) -> ModelLimits:
        validation.check_model(model, self._served.description.served_name)
        return self._served.limits()

    async def _read_input(
        self, request: pb.GenerateRequest | pb.ChatRequest, limits: ModelLimits
    ) -> tuple[str, tuple[int, ...]]:
        """Return the name of the field that holds the prompt, and the prompt's ids."""
        if isinstance(request, pb.ChatRequest):
            return "messages", tuple(await self._tokenize_chat(request.messages, limits))
        if request.WhichOneof("input") == "token_ids":
            ids = request.token_ids.ids
            return "token_ids", validation.check_token_ids(ids, limits.vocab_size, field="token_ids")
        validation.check_text(request.prompt, limits, field="prompt")
        return "prompt", tuple(await self._served.tokenizer.encode(request.prompt))

    def _prompt_text(self, request: pb.GenerateRequest | pb.ChatRequest, ids: tuple[int, ...]) -> str:
        """Return the prompt as the client wrote it, or what its ids spell."""
        if isinstance(request, pb.GenerateRequest) and request.WhichOneof("input") == "prompt":
            return request.prompt
        return self._served.tokenizer.decode(ids)

    async def _tokenize_chat(self, given: Any, limits: ModelLimits) -> list[int]:
        messages = validation.check_messages(given)
        for index, message in enumerate(messages):
            validation.check_text(message["content"], limits, field=f"messages[{index}].content")
        return await self._served.tokenizer.encode_chat(messages)


def _log_finish(request_id: str, finish: Finish) -> None:
    usage, timing = finish.reply.usage, finish.reply.timing
    log_event(
        _log,
        "finished",
        request_id=request_id,
        finish_reason="/".join(choice.reason for choice in finish.reply.choices),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=timing.queue_s,
        first_token_s=timing.first_token_s,
        total_s=timing.total_s,
        prefill_worker=finish.prefill_incarnation or "none",
        decode_worker=finish.decode_incarnation,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("phasor-serve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
