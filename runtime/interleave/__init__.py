"""Every schedule of a threaded object, by a deterministic scheduler over injected primitives. See docs/interleave.md.

It knows nothing of the rest of headrace and needs nothing but the standard library: an object can be searched if it takes its
Lock, RLock, Condition and Event from an argument instead of from `threading`.
"""

from .actors import Failure, Op
from .linear import Called, History, Model, Raised, Tracker, explain, linearize
from .primitives import Primitives, ScenarioError, WouldBlock
from .search import (
    IncompleteSearch,
    Report,
    Scenario,
    ScheduleFailure,
    after,
    explore,
    op,
    replay,
    sample,
    search,
)
from .session import RealWorld, Session, record, solo
from .world import World

__all__ = [
    "Called",
    "Failure",
    "History",
    "IncompleteSearch",
    "Model",
    "Op",
    "Primitives",
    "Raised",
    "RealWorld",
    "Report",
    "Scenario",
    "ScenarioError",
    "ScheduleFailure",
    "Session",
    "Tracker",
    "World",
    "WouldBlock",
    "after",
    "explain",
    "explore",
    "linearize",
    "op",
    "record",
    "replay",
    "sample",
    "search",
    "solo",
]
