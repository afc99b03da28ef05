from phasor.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("role", "incarnation", "ready", "identity", "rope", "max_model_len", "num_blocks", "block_bytes", "served_name", "model_folder", "dtype", "max_running", "pid", "metrics_address")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FOLDER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    role: _inference_pb2.WorkerRole
    incarnation: str
    ready: bool
    identity: _inference_pb2.Identity
    rope: _inference_pb2.RopeSummary
    max_model_len: int
    num_blocks: int
    block_bytes: int
    served_name: str
    model_folder: str
    dtype: str
    max_running: int
    pid: int
    metrics_address: str
    def __init__(self, role: _Optional[_Union[_inference_pb2.WorkerRole, str]] = ..., incarnation: _Optional[str] = ..., ready: _Optional[bool] = ..., identity: _Optional[_Union[_inference_pb2.Identity, _Mapping]] = ..., rope: _Optional[_Union[_inference_pb2.RopeSummary, _Mapping]] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., served_name: _Optional[str] = ..., model_folder: _Optional[str] = ..., dtype: _Optional[str] = ..., max_running: _Optional[int] = ..., pid: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class GetCountsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket_id", "decode_address", "decode_incarnation", "first_block", "num_blocks", "first_head", "num_heads", "deadline_s")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    decode_address: str
    decode_incarnation: str
    first_block: int
    num_blocks: int
    first_head: int
    num_heads: int
    deadline_s: float
    def __init__(self, ticket_id: _Optional[str] = ..., decode_address: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "rope_tier", "local_prefill", "timeout_s", "incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROPE_TIER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    rope_tier: float
    local_prefill: bool
    timeout_s: float
    incarnation: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., rope_tier: _Optional[float] = ..., local_prefill: _Optional[bool] = ..., timeout_s: _Optional[float] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("ticket", "cached_tokens")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    cached_tokens: int
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("admitted", "delta", "finished", "prompt_logprobs")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    delta: _inference_pb2.Delta
    finished: DecodeFinished
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., delta: _Optional[_Union[_inference_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("choices", "usage", "timing")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[_inference_pb2.ChoiceEnd]
    usage: _inference_pb2.Usage
    timing: _inference_pb2.Timing
    def __init__(self, choices: _Optional[_Iterable[_Union[_inference_pb2.ChoiceEnd, _Mapping]]] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., timing: _Optional[_Union[_inference_pb2.Timing, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "rope_tier", "ticket", "timeout_s", "incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROPE_TIER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    rope_tier: float
    ticket: Ticket
    timeout_s: float
    incarnation: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., rope_tier: _Optional[float] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., timeout_s: _Optional[float] = ..., incarnation: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("cached_tokens", "computed_tokens", "transferred_tokens", "transferred_bytes", "queue_s", "prefill_s", "transfer_s")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    computed_tokens: int
    transferred_tokens: int
    transferred_bytes: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    def __init__(self, cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., transferred_tokens: _Optional[int] = ..., transferred_bytes: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class LinkOffer(_message.Message):
    __slots__ = ("link_id", "prefill_incarnation", "decode_incarnation", "identity", "transport", "store_host", "store_port", "timeout_s")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    link_id: str
    prefill_incarnation: str
    decode_incarnation: str
    identity: _inference_pb2.Identity
    transport: str
    store_host: str
    store_port: int
    timeout_s: float
    def __init__(self, link_id: _Optional[str] = ..., prefill_incarnation: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., identity: _Optional[_Union[_inference_pb2.Identity, _Mapping]] = ..., transport: _Optional[str] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class LinkAccepted(_message.Message):
    __slots__ = ("decode_incarnation",)
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    decode_incarnation: str
    def __init__(self, decode_incarnation: _Optional[str] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("link_id", "ticket_id", "sequence", "first_block", "num_blocks", "run_lengths", "checksum", "last", "abort_reason")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ABORT_REASON_FIELD_NUMBER: _ClassVar[int]
    link_id: str
    ticket_id: str
    sequence: int
    first_block: int
    num_blocks: int
    run_lengths: _containers.RepeatedScalarFieldContainer[int]
    checksum: bytes
    last: LastChunk
    abort_reason: str
    def __init__(self, link_id: _Optional[str] = ..., ticket_id: _Optional[str] = ..., sequence: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., run_lengths: _Optional[_Iterable[int]] = ..., checksum: _Optional[bytes] = ..., last: _Optional[_Union[LastChunk, _Mapping]] = ..., abort_reason: _Optional[str] = ...) -> None: ...

class LastChunk(_message.Message):
    __slots__ = ("first_tokens", "num_tokens", "first_logprobs", "prompt_logprobs")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    first_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, first_tokens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., first_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("ticket_id", "sequence", "error")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    sequence: int
    error: str
    def __init__(self, ticket_id: _Optional[str] = ..., sequence: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
