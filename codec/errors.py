"""Errors: one base class, a stable `code` and an `http_status` each, in one table.

Owns: every error a user of headrace can see. Rules it keeps:

* A message is in plain words, names the offending value, and is always printable and encodable: values go through `show`,
  which escapes and cuts them (a lone surrogate or a NaN in an echo turned a 400 into a 500 in the field).
* Prompt text, token ids of a prompt, and other requests' rids never stand in a message.
* `code` is for programs and never changes; the words may.
"""

from __future__ import annotations

from typing import ClassVar, Final

from .limits import default

_SHOWN: Final = default("shown_value_chars")


def show(value: object) -> str:
    """`value` for a message: its ASCII repr (every other character escaped), cut at 80 characters. Never raises."""
    if isinstance(value, (str, bytes, bytearray)):
        value = value[: _SHOWN + 1]  # before repr: a repr of a megabyte would be built only to be cut
    elif isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"  # int -> str of huge values raises ValueError
    try:
        text = ascii(value)
    except Exception:  # a repr that raises belongs to the caller's object; the message must still be made
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


class HeadraceError(Exception):
    """Base of all. `code` and `http_status` are stable; `rid` is the client-facing request id where there is one."""

    code: ClassVar[str] = "internal"
    arises: ClassVar[str] = "never raised itself"
    http_status: int = 500

    def __init__(self, message: str, *, rid: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.rid = rid

    def to_dict(self) -> dict[str, object]:
        """The JSON rendering: ``{"error": {"code", "message", "status"}}``, always encodable as UTF-8."""
        error: dict[str, object] = {"code": self.code, "message": self.message, "status": self.http_status}
        if self.rid is not None:
            error["rid"] = self.rid
        return {"error": error}


class ValidationError(HeadraceError):
    """The request itself is wrong; `field` names the key where there is one."""

    code = "validation"
    arises = "a request, sampling parameter, rid or length that breaks a rule of admission"
    http_status = 400

    def __init__(self, message: str, *, field: str | None = None, rid: str | None = None) -> None:
        super().__init__(message, rid=rid)
        self.field = field


class EncodeError(HeadraceError):
    """The scheduler could not read the request (an ERROR frame), or it cannot be put on the wire."""

    code = "encode"
    arises = "the scheduler answered with an ERROR frame, or a value does not fit the wire"
    http_status = 400


class ClientClosedError(HeadraceError):
    """The request was aborted: by its client, by rid, by a deadline or by shutdown."""

    code = "client_closed"
    arises = "the request was aborted before its end"
    http_status = 499


class QueueFullError(HeadraceError):
    """No room: inbox, tokenizer pool, ingress ring, live table or admitted bytes. Try again later."""

    code = "queue_full"
    arises = "a bounded queue or table is full"
    http_status = 503


class ShuttingDownError(HeadraceError):
    """The manager is not running: not started, draining, stopped or failed."""

    code = "shutting_down"
    arises = "the manager no longer (or not yet) admits requests"
    http_status = 503


class SchedulerGoneError(HeadraceError):
    """The scheduler closed its side; nothing can be generated any more."""

    code = "scheduler_gone"
    arises = "the scheduler's side of a ring is closed while requests are live or submitted"
    http_status = 503


class SlowClientError(HeadraceError):
    """The client did not take its chunks in time and its sink overflowed; the stream is incomplete."""

    code = "slow_client"
    arises = "a stream's sink is full and more output arrived"
    http_status = 500


class TokenizeError(HeadraceError):
    """The tokenizer raised on this prompt."""

    code = "tokenize"
    arises = "the tokenizer failed on a prompt"
    http_status = 500


class DetokenizeError(HeadraceError):
    """Token ids that cannot be turned into text (an id outside the vocabulary)."""

    code = "detokenize"
    arises = "an output id is outside the vocabulary, or decoding failed"
    http_status = 500


class InternalError(HeadraceError):
    """A fault of the server or of its scheduler: malformed frame, illegal transition, dead stage."""

    code = "internal"
    arises = "a malformed frame, an illegal transition, or a stage that died"
    http_status = 500


class AbortedByScheduler(HeadraceError):
    """The scheduler ended the request with an abort that carries a status; `http_status` is that status."""

    code = "aborted_by_scheduler"
    arises = "finish reason abort with a status_code; the status is the scheduler's"

    def __init__(self, message: str, *, http_status: int, err_type: str | None = None, rid: str | None = None) -> None:
        super().__init__(message, rid=rid)
        self.http_status = http_status
        self.err_type = err_type


class FrameError(HeadraceError):
    """A frame that breaks a rule of the wire. `reason` is the rule's stable short name; `rids` are the requests it names.

    `rids_complete` is false where the list could not be read whole, so other live requests may have lost data too.
    `names_nobody`: no BATCH frame, and no rid to be read in it; it is counted and logged and fails nobody.
    """

    code = "frame"
    arises = "bytes that are not a frame of the schema; clients see it as `internal`"
    http_status = 500

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        rids: list[str] | None = None,
        rids_complete: bool = False,
        names_nobody: bool = False,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.rids: list[str] = rids if rids is not None else []
        self.rids_complete = rids_complete
        self.names_nobody = names_nobody


ERRORS: Final[tuple[type[HeadraceError], ...]] = (
    ValidationError,
    EncodeError,
    ClientClosedError,
    QueueFullError,
    ShuttingDownError,
    SchedulerGoneError,
    SlowClientError,
    TokenizeError,
    DetokenizeError,
    InternalError,
    AbortedByScheduler,
    FrameError,
)
"""The table that `docs/errors.md` is generated from; a class that is not in it fails a test."""
