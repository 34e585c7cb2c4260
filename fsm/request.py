"""The life of one request, from the client's call to its terminal item.

**Who owns the state.** Ingress owns it from RECEIVED to QUEUED; the last ingress step hands it, with the request's
entry, to the detokenizer shard of its rid, which owns it from QUEUED on. There is one state object per request and it
is handed over, never copied: two owners would each see half of the late events.

**Ingress half.** RECEIVED is a request that passed the checks on the caller's thread. VALIDATING decides what the
request needs. Generate requests are normalised, then tokenised (text), encoded (media) or neither (ids). All branches
meet in PRE_SEND_VALIDATING, and PRE_SEND_VALIDATED is the only event that enters QUEUED. That is why the length checks
sit there and not after the tokenizer: a client that sends ids must not bypass them, and no branch may run them twice.
A detokenize request takes this path too, although it never reaches the ring: its shard answers it from QUEUED.

**Egress half.** The first chunk is two events, SCHEDULER_PICKED and then CHUNK or FINAL_CHUNK, so a one-chunk answer
passes through STREAMING like any other. FINAL_CHUNK means that the finish reason was seen: from there the scheduler is
done with the request and no abort is owed to it (FINALIZING). FINAL_FRAME_SENT says that the terminal item is in the
sink. Control and detokenize requests have one answer, RESULT.

**Late events.** A client can leave, or a scheduler can answer, at any time; most such events meet a request that is
already over, and the shard cannot know. Those are absorbed in terminal states. FINALIZING absorbs output: a frame may
name a rid twice, and the first finish wins. What is *not* absorbed anywhere is an event that this side makes itself
and in order (VALIDATED, NEEDS_*, ALREADY_TOKENIZED, HAS_MULTIMODAL, PRE_SEND_VALIDATED): seen late, it is a fault of
the caller. Answers of a worker (TOKENIZE_DONE, ENCODE_DONE) may be late, because a client can disconnect while its
request is at the worker.

The table does not know kinds of request. The shard checks the kind first: a RESULT for a generate request, or a chunk
for a control or detokenize request, is a scheduler fault and becomes ERROR.
"""

from enum import auto

from .machine import FastEnum, Machine, absorb, illegal, move


class RequestState(FastEnum):
    """States of a request, in the order of the usual path; the last three are terminal."""

    RECEIVED = 0
    VALIDATING = auto()
    NORMALIZING = auto()
    ENCODING = auto()
    TOKENIZING = auto()
    PRE_SEND_VALIDATING = auto()
    QUEUED = auto()
    STREAMING = auto()
    FINALIZING = auto()
    COMPLETED = auto()
    FAILED = auto()
    ABORTED = auto()


class RequestEvent(FastEnum):
    """Events of a request, in the order in which the table first names them."""

    VALIDATED = 0
    NEEDS_NORMALIZE = auto()
    ALREADY_TOKENIZED = auto()
    HAS_MULTIMODAL = auto()
    NEEDS_TOKENIZE = auto()
    ENCODE_DONE = auto()
    TOKENIZE_DONE = auto()
    PRE_SEND_VALIDATED = auto()
    SCHEDULER_PICKED = auto()
    RESULT = auto()
    CHUNK = auto()
    FINAL_CHUNK = auto()
    FINAL_FRAME_SENT = auto()
    ERROR = auto()
    DISCONNECT = auto()


_S, _E = RequestState, RequestEvent

_INGRESS = (_S.RECEIVED, _S.VALIDATING, _S.NORMALIZING, _S.ENCODING, _S.TOKENIZING, _S.PRE_SEND_VALIDATING)
_EGRESS = (_S.QUEUED, _S.STREAMING, _S.FINALIZING)
_TERMINAL = (_S.COMPLETED, _S.FAILED, _S.ABORTED)

# Decisions that ingress makes itself, one after the other.
_OWN = (
    _E.VALIDATED,
    _E.NEEDS_NORMALIZE,
    _E.ALREADY_TOKENIZED,
    _E.HAS_MULTIMODAL,
    _E.NEEDS_TOKENIZE,
    _E.PRE_SEND_VALIDATED,
)
_WORKER = (_E.ENCODE_DONE, _E.TOKENIZE_DONE)
_OUTPUT = (_E.SCHEDULER_PICKED, _E.RESULT, _E.CHUNK, _E.FINAL_CHUNK)
_ENDS = (_E.ERROR, _E.DISCONNECT)


def _own_but(*allowed: RequestEvent) -> tuple[RequestEvent, ...]:
    return tuple(event for event in _OWN if event not in allowed)


REQUEST = Machine(
    "request",
    1,
    RequestState,
    RequestEvent,
    initial=_S.RECEIVED,
    terminal=_TERMINAL,
    groups={"ingress": _INGRESS, "egress": _EGRESS, "terminal": _TERMINAL},
    about="The life of one request, from the client's call to its terminal item.",
    rules=[
        # ingress
        move(_S.RECEIVED, _E.VALIDATED, _S.VALIDATING, "admission checks passed"),
        move(_S.VALIDATING, _E.NEEDS_NORMALIZE, _S.NORMALIZING, "generate: sampling parameters"),
        move(_S.VALIDATING, _E.ALREADY_TOKENIZED, _S.PRE_SEND_VALIDATING, "control and detokenize have none"),
        move(_S.NORMALIZING, _E.HAS_MULTIMODAL, _S.ENCODING, "an encoder produces the final ids"),
        move(_S.NORMALIZING, _E.NEEDS_TOKENIZE, _S.TOKENIZING, "the prompt is text"),
        move(_S.NORMALIZING, _E.ALREADY_TOKENIZED, _S.PRE_SEND_VALIDATING, "the client gave ids"),
        move(_S.ENCODING, _E.ENCODE_DONE, _S.PRE_SEND_VALIDATING, "the encoder answered"),
        move(_S.TOKENIZING, _E.TOKENIZE_DONE, _S.PRE_SEND_VALIDATING, "the tokenizer answered"),
        move(
            _S.PRE_SEND_VALIDATING,
            _E.PRE_SEND_VALIDATED,
            _S.QUEUED,
            "the only way in: the length checks run exactly once on every branch",
        ),
        # egress
        move(_S.QUEUED, _E.SCHEDULER_PICKED, _S.STREAMING, "the first chunk was seen"),
        move(_S.QUEUED, _E.RESULT, _S.COMPLETED, "control and detokenize: one answer"),
        move(_S.STREAMING, _E.CHUNK, _S.STREAMING, "counts chunks"),
        move(_S.STREAMING, _E.FINAL_CHUNK, _S.FINALIZING, "a finish reason is present; no abort is owed any more"),
        move(_S.FINALIZING, _E.FINAL_FRAME_SENT, _S.COMPLETED, "the terminal item is in the sink"),
        # ends, from everywhere
        move((*_INGRESS, *_EGRESS), _E.ERROR, _S.FAILED, "whatever failed, the client is told once"),
        move((*_INGRESS, *_EGRESS), _E.DISCONNECT, _S.ABORTED, "the client left or somebody aborted the request"),
        # late
        absorb(_S.FINALIZING, _OUTPUT, "late: a frame named the request twice, and the first finish wins"),
        absorb(
            _TERMINAL,
            (*_WORKER, *_OUTPUT, _E.FINAL_FRAME_SENT, *_ENDS),
            "late: the request was over before the sender could know",
        ),
        # what cannot be
        illegal(_S.RECEIVED, _own_but(_E.VALIDATED), "the admission checks come first"),
        illegal(_S.VALIDATING, _own_but(_E.NEEDS_NORMALIZE, _E.ALREADY_TOKENIZED), "what it needs is decided here"),
        illegal(
            _S.NORMALIZING,
            _own_but(_E.HAS_MULTIMODAL, _E.NEEDS_TOKENIZE, _E.ALREADY_TOKENIZED),
            "parameters are normalised before anything else; the length checks cannot be skipped",
        ),
        illegal((_S.ENCODING, _S.TOKENIZING), _OWN, "the request is at a worker, which alone can bring it back"),
        illegal(_S.PRE_SEND_VALIDATING, _own_but(_E.PRE_SEND_VALIDATED), "all decisions were made before"),
        illegal((*_EGRESS, *_TERMINAL), _OWN, "the request has left ingress; only ingress makes this event, in order"),
        illegal(
            (_S.RECEIVED, _S.VALIDATING, _S.NORMALIZING, _S.PRE_SEND_VALIDATING, *_EGRESS),
            _WORKER,
            "no worker was asked, or it has already answered",
        ),
        illegal(_S.ENCODING, _E.TOKENIZE_DONE, "the tokenizer was not asked"),
        illegal(_S.TOKENIZING, _E.ENCODE_DONE, "the encoder was not asked"),
        illegal(_INGRESS, (*_OUTPUT, _E.FINAL_FRAME_SENT), "the scheduler has not been given this request"),
        illegal(_S.QUEUED, (_E.CHUNK, _E.FINAL_CHUNK), "the first chunk is SCHEDULER_PICKED and then the chunk"),
        illegal(_S.STREAMING, (_E.SCHEDULER_PICKED, _E.RESULT), "the first chunk was seen; a stream has no RESULT"),
        illegal((_S.QUEUED, _S.STREAMING), _E.FINAL_FRAME_SENT, "no final chunk was seen"),
    ],
)
