"""`headrace check`: the tables, the explorer's configurations, and the formal models where their checker is installed.

Owns: which small worlds are explored, with which bounds and pinned counts. One configuration per kind of request at least, and one
per fault, abort source and shutdown; `DEEP` ones are larger and run in the deep profile. A count changes only with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import IO, Final

import numpy as np

from ..fsm import MACHINES
from .explorer import Result, explore
from .explorer_world import SHARED, Setup, SmallWorld
from .pipeline import Pipeline

STATES: Final[dict[Setup, int]] = {}
"""The configurations of every run, and how many states each has."""

DEEP: Final[dict[Setup, int]] = {}
"""Larger ones, for the deep profile."""


def _add(table: dict[Setup, int], states: int, name: str, *requests: str, **fields: object) -> None:
    table[Setup(name=name, requests=requests, **fields)] = states  # type: ignore[arg-type]


_add(STATES, 1922, "stream, abort", "stream", "stream", abort=(0, "GUARD"))
_add(STATES, 1700, "whole, two shards, abort", "whole", "stream", shards=2, abort=(1, "API"))
_add(STATES, 2510, "text, abort", "text", "stream", abort=(0, "API"))
_add(STATES, 7442, "shutdown", "stream", "control", shutdown=True)
_add(STATES, 2745, "shutdown, abort", "text", abort=(0, "GUARD"), shutdown=True, reading=True)
_add(STATES, 1936, "malformed frame", "stream", "stream", fault="malformed")
_add(STATES, 9189, "malformed frame without rids, two shards", "stream", "whole", shards=2, fault="malformed_list")
_add(STATES, 1611, "duplicate in a frame, small sink", "stream", "stream", fault="duplicate", sink=1, reading=True)
_add(STATES, 8900, "error frame, abort", "stream", "stream", fault="error", abort=(0, "API"))
_add(STATES, 1821, "id outside the vocabulary", "stream", "whole", fault="bad_id")
_add(STATES, 7587, "scheduler dies, abort", "stream", "stream", fault="die", abort=(0, "GUARD"))
_add(STATES, 750, "control, abort", "control", "stream", abort=(0, "GUARD"))
_add(STATES, 923, "control, shutdown", "control", shutdown=True, fault="wrong")
_add(STATES, 190, "chunk for control", "control", fault="wrong", abort=(0, "API"))
_add(STATES, 1614, "result for generate", "stream", "stream", fault="wrong")
_add(STATES, 157, "decode, abort", "decode", "stream", abort=(0, "API"))
_add(STATES, 748, "decode, shutdown", "decode", "control", shutdown=True)
_add(STATES, 177, "tokenizer raises", "raising", "text", abort=(1, "API"))
_add(STATES, 23, "batch, tokenizer raises", "raising", "text", batch=True, ring_in=2, abort=(1, "API"))
_add(STATES, 1130, "batch", "text", "stream", batch=True, ring_in=2, abort=(0, "GUARD"))
_add(STATES, 10827, "everything at once", "text", abort=(0, "API"), fault="die", shutdown=True)
_add(STATES, 2382, "three chunks, small sink", "stream", "stream", chunks=3, sink=1, reading=True)
_add(DEEP, 14109, "two streams, shutdown", "stream", "stream", shutdown=True)
_add(DEEP, 63327, "shutdown, scheduler dies", "stream", "whole", fault="die", shutdown=True)
_add(DEEP, 44508, "abort, malformed frame, two shards", "text", "stream", shards=2, fault="malformed", abort=(1, "API"))


def explored(setup: Setup, pipeline: Callable[..., Pipeline] = Pipeline, *, audit: bool = False) -> Result:
    """The search of one configuration, with the shipped pipeline or another."""
    return explore(setup.name, partial(SmallWorld, setup, pipeline), shared=SHARED, audit=audit)


def tables() -> list[str]:
    """One line for each machine. That they can be imported says it all: a table with a gap, a state that nothing reaches or cannot
    end, or a way out of a terminal state is refused when it is declared."""
    lines = []
    for name, machine in MACHINES.items():
        moves, absorbs, illegal = np.bincount(machine.outcomes.ravel(), minlength=3).tolist()
        pairs = machine.outcomes.size
        lines.append(
            f"table {name}/{machine.revision}: complete=true pairs={pairs} moves={moves} absorbs={absorbs} illegal={illegal}"
        )
    return lines


def bounds_of(given: Iterable[str]) -> dict[str, int]:
    """Bounds of the formal models from ``NAME=NUMBER``; ValueError naming what is not that."""
    bounds = {}
    for item in given:
        name, _, value = item.partition("=")
        if not re.fullmatch(r"[A-Z_]+", name) or not re.fullmatch(r"[0-9]{1,4}", value):
            raise ValueError(f"a bound is NAME=NUMBER (for example N=3), not {item!a}")
        bounds[name] = int(value)
    return bounds


def run_command(
    out: IO[str],
    *,
    deep: bool = False,
    only: str = "",
    formal: bool = False,
    mutants: bool = False,
    bounds: Mapping[str, int] | None = None,
) -> int:
    """`headrace check`: 0 if every table is total and every search was complete and found nothing; else 1."""
    good = True
    _print(tables(), out)
    chosen = {**STATES, **(DEEP if deep else {})}
    for setup, states in chosen.items():
        if only in setup.name:
            result = explored(setup)
            _print(result.lines(), out)
            good &= result.complete
            if result.complete and states != result.states:
                _print([f"  {states} states were known; a count changes only with a reason"], out)
                good = False
    if formal:
        good &= _formal(out, only=only, deep=deep, mutants=mutants, bounds=dict(bounds or {}))
    _print([f"all hold: {'true' if good else 'false'}"], out)
    return 0 if good else 1


def _formal(out: IO[str], *, only: str, deep: bool, mutants: bool, bounds: dict[str, int]) -> bool:
    """The formal models, run by their own module; where their checker is not installed that is said, and is no failure."""
    from ..fsm import formal  # a module that most runs do not need

    why = formal.missing()
    if why is not None:
        _print([f"formal models: not run: {why}"], out)
        return True
    if not any(only in job.name for job in formal.jobs(mutants=mutants, deep=deep)):
        _print([f"formal models: none has {only!a} in its name"], out)
        return True
    results = formal.run_formal(
        only=only, deep=deep, mutants=mutants, bounds=bounds, report=lambda line: _print([line], out)
    )
    return all(result.ok for result in results)


def _print(lines: Iterable[str], out: IO[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))
    out.flush()
