"""Messages, frames, sampling parameters, finish reasons, errors: everything that is bytes or becomes bytes.

Floor 1: knows `fsm` and `specs`; knows no thread, channel or clock. `strategies` and `fuzz` need Hypothesis and are imported as
modules (`from headrace.codec import strategies`), never from here.
"""

from .admission import AdmissionRules, Fit, GenerateRequest, NormalizedRequest, admit, fit_length
from .batch import BatchFrame
from .body import GenerateBody
from .checks import RequestLimits
from .chunk import ChunkEvent
from .decode import ControlResult, RequestFailure, decode_frame
from .encode import (
    EGRESS_TAG_BATCH,
    EGRESS_TAG_ERROR,
    EGRESS_TAG_RESULT,
    encode_batch,
    encode_batch_cols,
    frame_egress_batch_cols,
    frame_egress_error,
    frame_egress_result,
)
from .errors import (
    AbortedByScheduler,
    ClientClosedError,
    DetokenizeError,
    EncodeError,
    FrameError,
    HeadraceError,
    InternalError,
    QueueFullError,
    SchedulerGoneError,
    ShuttingDownError,
    SlowClientError,
    TokenizeError,
    ValidationError,
)
from .finish import Abort, FinishReason, Length, Stop, Unknown, parse_finish_reason
from .ingress import (
    AbortMessage,
    BadMessage,
    ControlMessage,
    GenerateMessage,
    IngressColumns,
    IngressMessage,
    decode_ingress,
    encode_abort,
    encode_control,
    encode_generate,
)
from .rid import Rid
from .sampling import NormalizedSamplingParams, SamplingParams
from .schema import WireSchema, load_schema
from .stop_regex import compile_stop_regex

__all__ = [
    "EGRESS_TAG_BATCH",
    "EGRESS_TAG_ERROR",
    "EGRESS_TAG_RESULT",
    "Abort",
    "AbortMessage",
    "AbortedByScheduler",
    "AdmissionRules",
    "BadMessage",
    "BatchFrame",
    "ChunkEvent",
    "ClientClosedError",
    "ControlMessage",
    "ControlResult",
    "DetokenizeError",
    "EncodeError",
    "FinishReason",
    "Fit",
    "FrameError",
    "GenerateBody",
    "GenerateMessage",
    "GenerateRequest",
    "HeadraceError",
    "IngressColumns",
    "IngressMessage",
    "InternalError",
    "Length",
    "NormalizedRequest",
    "NormalizedSamplingParams",
    "QueueFullError",
    "RequestFailure",
    "RequestLimits",
    "Rid",
    "SamplingParams",
    "SchedulerGoneError",
    "ShuttingDownError",
    "SlowClientError",
    "Stop",
    "TokenizeError",
    "Unknown",
    "ValidationError",
    "WireSchema",
    "admit",
    "compile_stop_regex",
    "decode_frame",
    "decode_ingress",
    "encode_abort",
    "encode_batch",
    "encode_batch_cols",
    "encode_control",
    "encode_generate",
    "fit_length",
    "frame_egress_batch_cols",
    "frame_egress_error",
    "frame_egress_result",
    "load_schema",
    "parse_finish_reason",
]
