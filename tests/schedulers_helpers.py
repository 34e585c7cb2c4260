"""A scheduler's port without a manager: requests are put in as messages, frames come out decoded and kept per request."""

from collections import deque

import numpy as np
from headrace.codec.admission import AdmissionRules, GenerateRequest, admit
from headrace.codec.batch import BatchFrame
from headrace.codec.decode import ControlResult, RequestFailure, decode_frame
from headrace.codec.encode import frame_egress_batch_cols, frame_egress_error, frame_egress_result
from headrace.codec.ingress import IngressColumns, IngressMessage, encode_abort, encode_control, encode_generate
from headrace.codec.sampling import SamplingParams
from headrace.codec.schema import load_schema

VOCAB = 7168


class FakePort:
    """What a scheduler needs of `SchedulerPort`, single-threaded; `waits` counts how often it asked to sleep."""

    def __init__(self, wire: str = "v1") -> None:
        self.schema = load_schema(wire)
        self.inbox: deque[IngressMessage] = deque()
        self.frames: list[BatchFrame] = []
        self.controls: dict[str, bytes] = {}
        self.errors: dict[str, str] = {}
        self.raw: list[bytes] = []
        self.closed = False
        self.waits = 0

    # ---- the manager's side

    def generate(self, rid: str, ids, text: str | None = None, **params) -> str:
        """Puts a request in; returns its internal rid."""
        rules = AdmissionRules(context_len=1 << 40, vocab_size=VOCAB)
        request = admit(
            GenerateRequest(input_ids=list(ids), sampling_params=SamplingParams(**params), rid=rid, stream=True),
            rules,
            self.schema,
        )
        message = encode_generate(
            self.schema, request, request.input_ids, max_new_tokens=request.sampling.max_new_tokens
        )
        self.inbox.append(message)
        return str(request.rid)

    def abort(self, rid: str, abort_all: bool = False) -> None:
        self.inbox.append(encode_abort(self.schema, rid, abort_all=abort_all))

    def control(self, tag: str, rid: str, *fields) -> None:
        self.inbox.append(encode_control(self.schema, tag, rid, *fields))

    def ids(self, rid: str) -> list[int]:
        """All ids that came for `rid`, in order."""
        return [i for frame in self.frames for chunk in frame if chunk.rid == rid for i in chunk.token_ids.tolist()]

    def ends(self, rid: str) -> list[dict]:
        """Every finish reason that came for `rid`."""
        return [
            c.finish_reason.to_map() for f in self.frames for c in f if c.rid == rid and c.finish_reason is not None
        ]

    def lens(self, rid: str) -> list[int]:
        """Ids per frame for the frames that name `rid`."""
        return [len(chunk.token_ids) for frame in self.frames for chunk in frame if chunk.rid == rid]

    # ---- the scheduler's side

    def wait_request(self, timeout_s=None) -> bool:
        self.waits += 1
        if not self.inbox:
            self.closed = True  # nothing can ever come in one thread: the run is over
        return bool(self.inbox)

    def recv_requests(self, max: int = 256) -> IngressColumns:
        return IngressColumns.from_messages([self.inbox.popleft() for _ in range(min(max, len(self.inbox)))])

    def push_batch(self, header, data_cols, timeout_s=None) -> bool:
        return self.push_frame(frame_egress_batch_cols(header, data_cols))

    def push_frame(self, frame, timeout_s=None) -> bool:
        self.raw.append(bytes(frame))
        if self.closed:
            return False
        decoded = decode_frame(bytes(frame), self.schema)
        if isinstance(decoded, BatchFrame):
            assert len(set(decoded.rids)) == len(decoded.rids), "a rid twice in one frame"
            self.frames.append(decoded)
        elif isinstance(decoded, ControlResult):
            self.controls[decoded.rid] = decoded.payload
        elif isinstance(decoded, RequestFailure):
            self.errors[decoded.rid] = decoded.message
        return True

    def push_control_result(self, rid: str, payload: bytes, timeout_s=None) -> bool:
        return self.push_frame(frame_egress_result(rid, payload))

    def push_error(self, rid: str, message: str, timeout_s=None) -> bool:
        return self.push_frame(frame_egress_error(rid, message))

    def close(self) -> None:
        self.closed = True


def run_dry(scheduler, most: int = 100_000) -> int:
    """Steps until nothing is left to do; the number of steps."""
    for step in range(most):
        if not scheduler.step():
            return step
    raise AssertionError(f"still busy after {most} steps")


def bad_header(rid: str) -> IngressMessage:
    """A generate request with a readable rid whose sampling array is a number."""
    header = (
        b"\x99" + b"\xb9TokenizedGenerateReqInput" + bytes([0xA0 + len(rid)]) + rid.encode() + b"\xc0" * 6 + b"\x07"
    )
    return IngressMessage(rid=rid, header=header, ids=np.arange(3, dtype=np.int64))
