"""Every limit of headrace, declared once: name, default, unit, what happens at the limit, and why it exists.

Owns: the numbers. `RuntimeConfig`, the admission rules, the wire schemas' bounds and the page `docs/limits.md` all read them
from here; a second copy of a number elsewhere is a bug. A limit is never "unlimited": every buffer, table, loop and wait
has one, because items alone do not bound bytes and a client chooses the sizes.
"""

from typing import Final, NamedTuple


class Limit(NamedTuple):
    """One limit: `default` counts `unit`; `effect` is what a caller sees at the limit; `reason` says why it is there."""

    name: str
    default: int
    unit: str
    effect: str
    reason: str


KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

_ALL: Final = (
    Limit(
        "ingress_ring_capacity",
        8192,
        "messages",
        "503 queue_full for that request",
        "a stalled scheduler must not grow the process",
    ),
    Limit(
        "channel_capacity",
        8192,
        "requests",
        "503 queue_full for that request",
        "the inbox and the tokenizer pool's queue",
    ),
    Limit(
        "admitted_bytes",
        1 * GIB,
        "bytes",
        "503 queue_full for that request",
        "8192 requests of a million tokens each are not 8192 small ones",
    ),
    Limit(
        "max_live_requests",
        16_384,
        "requests",
        "503 queue_full; a live entry is never evicted",
        "every other table is sized by it",
    ),
    Limit(
        "egress_ring_capacity",
        8192,
        "frames",
        "the producer parks",
        "committed output is never dropped, so the producer waits",
    ),
    Limit(
        "egress_ring_bytes",
        256 * MIB,
        "bytes",
        "the producer parks; one larger frame passes when the ring is empty",
        "frames differ in size by six orders of magnitude",
    ),
    Limit(
        "max_frame_bytes",
        64 * MIB,
        "bytes",
        "FrameError too_large",
        "a length field must not be able to ask for memory",
    ),
    Limit(
        "max_header_bytes",
        16 * MIB,
        "bytes",
        "FrameError too_large",
        "the header is decoded into Python objects, about ten times its size",
    ),
    Limit(
        "sink_capacity",
        4096,
        "chunks put in and not yet taken",
        "error to the client, abort to the scheduler",
        "a slow reader must not hold a whole answer of small pieces",
    ),
    Limit(
        "max_prompt_bytes",
        64 * MIB,
        "bytes",
        "400 validation",
        "bounds tokenising where no sound bound on tokens per byte exists",
    ),
    Limit("max_batch_items", 4096, "requests", "400 validation", "one body must not fill every table"),
    Limit(
        "max_broadcast_bytes",
        64 * MIB,
        "bytes",
        "400 validation",
        "a scalar copied to every item of a batch is an amplifier",
    ),
    Limit(
        "max_rid_bytes",
        128,
        "bytes of UTF-8",
        "400 validation",
        "the rid is copied into every frame and every log line",
    ),
    Limit("max_stop_strings", 32, "strings", "400 validation", "each is scanned at every step"),
    Limit("max_stop_bytes", 1024, "bytes of UTF-8", "400 validation", "the longest is the window of text held back"),
    Limit("max_stop_regexes", 32, "patterns", "400 validation", "each is scanned at every step"),
    Limit(
        "max_stop_regex_bytes",
        256,
        "bytes of UTF-8",
        "400 validation",
        "analysis and compilation grow with the pattern",
    ),
    Limit("max_stop_token_ids", 1024, "ids", "400 validation", "compared at every step"),
    Limit("max_token_ids_logprob", 1024, "ids", "400 validation", "one row of this width for every token"),
    Limit("max_logit_bias", 1024, "entries", "400 validation", "applied at every step"),
    Limit(
        "max_top_logprobs",
        1024,
        "candidates",
        "400 validation (or the vocabulary's size where smaller)",
        "one row of this width for every token",
    ),
    Limit(
        "max_grammar_bytes",
        1 * MIB,
        "bytes of UTF-8",
        "400 validation",
        "compiled by the scheduler before the request can run",
    ),
    Limit(
        "max_custom_params_bytes",
        64 * KIB,
        "bytes of msgpack",
        "400 validation",
        "free form, so only its encoded size bounds it",
    ),
    Limit("regex_cache_size", 512, "compiled patterns, successes only", "cleared whole", "clients choose the keys"),
    Limit(
        "trace_capacity",
        65_536,
        "events",
        "recording stops and says so",
        "a trace with a hole in the middle proves nothing",
    ),
    Limit("drain_timeout_s", 30, "seconds", "the rest is aborted", "a shutdown must end"),
    Limit(
        "join_timeout_s",
        5,
        "seconds",
        "shutdown reports which thread is left",
        "a thread that hangs must not hang the caller",
    ),
    Limit(
        "control_timeout_s",
        60,
        "seconds",
        "TimeoutError; the entry is dropped",
        "a scheduler may never answer a control request",
    ),
    Limit(
        "shown_value_chars",
        80,
        "characters",
        "cut, with an ellipsis",
        "an error message must not carry a megabyte back",
    ),
)

LIMITS: Final[dict[str, Limit]] = {limit.name: limit for limit in _ALL}


def default(name: str) -> int:
    """The default of the limit called `name`; KeyError for a name that is not declared."""
    return LIMITS[name].default
