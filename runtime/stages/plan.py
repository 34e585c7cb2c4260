"""What a shard knows of a batch, and what a step of it gives away. Plain data.

Owns: the lanes, in which rows are served in columns; the plan of a batch, which is kept while the batch and the table stay what they are;
and `ShardOut`, the outbox of a step.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...codec import FinishReason
from ...codec.errors import HeadraceError
from ..sink import Columns, EgressItem, Extras, Sink, Terminal
from .life import Ended, Life

if TYPE_CHECKING:
    from .dispatch import Batch


class Lane(enum.IntEnum):
    """How a row's one-id chunk is served in columns; GENERAL is one by one."""

    GENERAL = 0  # not picked yet, or not live
    PLAIN = 1  # streams to a handle; the token's text is the delta
    HELD = 2  # streams to a handle; stops, or characters split over tokens
    QUIET = 3  # non-streaming: only its ids are kept
    STEP = 4  # streams to the step sink


# A member's look-up through its class costs as much as a step of a machine (CPython 3.11), and these are met for every request.
GENERAL, PLAIN, HELD, QUIET, STEP = Lane
FAST_LANES = (PLAIN, HELD, QUIET, STEP)


class StepColumns(NamedTuple):
    """Plain deltas of one step for the step sink, one id each: what the requests are called by, texts, ids (int64, owned)."""

    tokens: Sequence[Any]
    texts: list[str]
    ids: np.ndarray[Any, Any]
    extras: Sequence[Extras] = ()


class StepRow:
    """What one step produced for one request of the step sink."""

    __slots__ = ("error", "extras", "finish_reason", "text", "token", "token_ids")

    def __init__(
        self,
        token: Any,
        text: str,
        token_ids: np.ndarray[Any, Any],
        finish_reason: FinishReason | None,
        error: HeadraceError | None,
        extras: Sequence[Extras] = (),
    ) -> None:
        self.token = token
        self.text = text
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.error = error
        self.extras = extras

    @property
    def ends(self) -> bool:
        """Whether this is the request's terminal item."""
        return self.finish_reason is not None or self.error is not None


class ShardOut:
    """What a step gives away. `columns` and `items` go to sinks and may be refused; the rest cannot be."""

    __slots__ = (
        "begun", "columns", "counts", "ended", "faults", "items", "owed", "rest", "run", "step_columns", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.begun: list[tuple[Sink, int, Mapping[str, Any] | None]] = []  # first output: prompt_tokens and scalars
        self.columns: list[Columns] = []
        # None: the end of a request of the step sink, told by its row
        self.items: list[tuple[Life, EgressItem.Frame | Terminal | None]] = []
        self.steps: list[StepRow] = []
        self.step_columns: list[StepColumns] = []
        self.run: list[StepColumns] = []  # of a run, one for each of its steps; then the two above are empty
        self.rest: Batch | None = None  # the steps of a run that were not taken; to be served next
        self.owed: list[Ended] = []
        self.ended: list[str] = []
        self.counts: dict[str, int] = {}
        self.faults: list[str] = []  # server faults in words that name no data, for the driver's log

    @property
    def plain(self) -> bool:
        """Whether there is nothing but columns for the sinks of handles, or not even that."""
        return not (
            self.ended or self.step_columns or self.run or self.steps or self.counts or self.owed or self.faults
        )

    def count(self, name: str, times: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + times


class Group:
    """Rows of one batch that are served alike: their positions in it (None: all), and where their output goes."""

    __slots__ = ("columns", "lane", "odd", "positions", "quiet", "rows", "states", "tokens")

    def __init__(self, lane: Lane, positions: Any, rows: Sequence[int]) -> None:
        self.lane = lane
        self.positions = positions
        self.rows = rows
        self.columns = Columns((), (), ())  # PLAIN, HELD: used again at every step of the same batch
        self.states: Sequence[Any] = ()  # HELD, STEP: text states
        self.odd: set[int] = set()  # STEP: positions of those that are not plain
        self.quiet: Sequence[array[int]] = ()  # QUIET: the ids so far
        self.tokens: Sequence[Any] = ()  # STEP: what the requests are called by

    def without(self, gone: Sequence[int]) -> Group:
        """The same without the rows at these positions, ascending. For a group that is all of its batch."""
        left = Group(self.lane, None, _without(self.rows, gone))
        left.columns = self.columns.without(gone)
        left.states = _without(self.states, gone)
        left.quiet = _without(self.quiet, gone)
        left.tokens = _without(self.tokens, gone)
        left.odd = {at for at, state in enumerate(left.states) if not state.plain} if self.odd else set()
        return left

    def with_more(self, more: Group, fresh: bool) -> Group:
        """The rows of `more` behind these. For two groups of one lane; `fresh`: nothing has come of `more` yet."""
        both = Group(self.lane, None, [*self.rows, *more.rows])
        both.columns = self.columns.with_more(more.columns, fresh)
        both.states = [*self.states, *more.states]
        both.quiet = [*self.quiet, *more.quiet]
        both.tokens = [*self.tokens, *more.tokens]
        both.odd = self.odd | {len(self.rows) + at for at in more.odd}
        return both


def _without(values: Sequence[Any], gone: Sequence[int]) -> list[Any]:
    left = list(values)
    if left:
        for at in reversed(gone):
            del left[at]
    return left


class Plan:
    """What was looked up for one batch of rids (see `Shard._look_up`)."""

    __slots__ = (
        "all_fast",
        "all_in",
        "base",
        "changes",
        "column",
        "distinct",
        "due",
        "fresh",
        "groups",
        "headroom",
        "layout",
        "lengths",
        "quiet",
        "rids",
        "rows",
        "single",
    )

    def __init__(self, changes: int, rids: list[str], rows: list[int], column: Any, distinct: bool) -> None:
        self.changes = changes
        self.layout: Any = None  # of the last frame that was looked at
        self.single = False  # whether that one is plain: one id each, nothing ends
        self.lengths: Any = None  # ids of each row, where nothing ends in it
        self.rids = rids
        self.rows = rows
        self.column = column
        self.distinct = distinct  # no live request stands twice in the batch
        self.fresh: list[int] = []  # positions of requests of which nothing has come yet
        self.all_fast = False
        self.base: Plan | None = None  # what it is to be made of, where the batch has grown
        self.quiet = False  # all are of the lane QUIET
        self.groups: list[Group] = []
        self.headroom = 0
        self.all_in = -1  # the state that all rows are in, once it is known
        self.due = 0  # tokens of each row that its column does not count yet

    @property
    def of_one_lane(self) -> bool:
        """Whether all rows are served alike."""
        return self.all_fast and self.distinct and len(self.groups) == 1 and self.groups[0].positions is None

    def without(self, gone: Sequence[int]) -> Plan:
        """The plan of the batch without the rows at these few positions, ascending. For one whose rows are all of one group."""
        keep = np.ones(len(self.rows), dtype=bool)
        keep[gone] = False
        left = Plan(self.changes, _without(self.rids, gone), _without(self.rows, gone), self.column[keep], True)
        left.all_fast, left.quiet = bool(left.rows), self.quiet
        left.groups = [self.groups[0].without(gone)]
        left.headroom, left.all_in = self.headroom, self.all_in
        return left


NO_PLAN = Plan(-1, [], [], np.empty(0, dtype=np.intp), True)
