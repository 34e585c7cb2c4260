"""Messages, frames, sampling parameters, finish reasons, errors: everything that is bytes or becomes bytes.

Floor 1: knows `fsm` and `specs`; knows no thread, channel or clock. `strategies` and `fuzz` need Hypothesis and are imported as
modules (`from headrace.codec import strategies`), never from here.
"""

from .batch import BatchFrame
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
from .schema import WireSchema, load_schema

__all__ = [
    "EGRESS_TAG_BATCH",
    "EGRESS_TAG_ERROR",
    "EGRESS_TAG_RESULT",
    "Abort",
    "AbortedByScheduler",
    "BatchFrame",
    "ChunkEvent",
    "ClientClosedError",
    "ControlResult",
    "DetokenizeError",
    "EncodeError",
    "FinishReason",
    "FrameError",
    "HeadraceError",
    "InternalError",
    "Length",
    "QueueFullError",
    "RequestFailure",
    "SchedulerGoneError",
    "ShuttingDownError",
    "SlowClientError",
    "Stop",
    "TokenizeError",
    "Unknown",
    "ValidationError",
    "WireSchema",
    "decode_frame",
    "encode_batch",
    "encode_batch_cols",
    "frame_egress_batch_cols",
    "frame_egress_error",
    "frame_egress_result",
    "load_schema",
    "parse_finish_reason",
]
