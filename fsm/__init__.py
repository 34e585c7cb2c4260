"""The state machines: declared once, checked at import, and the thing that runs.

This floor knows states, events, tables and traces; it knows no bytes, threads or time.
"""

from typing import Any

from .abort import ABORT, ABORT_EVENTS, AbortEvent, AbortRequest, AbortSource, AbortState
from .exports import export, reference
from .lifecycle import LIFECYCLE, LifecycleEvent, LifecycleState
from .machine import DeclarationError, IllegalTransition, Machine
from .perfetto import to_perfetto
from .request import REQUEST, RequestEvent, RequestState
from .ring import RING, RingEvent, RingState
from .sink import SINK, SinkEvent, SinkState
from .trace import Trace, TraceError, TraceEvent
from .validator import Violation, validate

MACHINES: dict[str, Machine[Any, Any]] = {machine.name: machine for machine in (REQUEST, ABORT, RING, SINK, LIFECYCLE)}

__all__ = [
    "ABORT",
    "ABORT_EVENTS",
    "LIFECYCLE",
    "MACHINES",
    "REQUEST",
    "RING",
    "SINK",
    "AbortEvent",
    "AbortRequest",
    "AbortSource",
    "AbortState",
    "DeclarationError",
    "IllegalTransition",
    "LifecycleEvent",
    "LifecycleState",
    "Machine",
    "RequestEvent",
    "RequestState",
    "RingEvent",
    "RingState",
    "SinkEvent",
    "SinkState",
    "Trace",
    "TraceError",
    "TraceEvent",
    "Violation",
    "export",
    "reference",
    "to_perfetto",
    "validate",
]
