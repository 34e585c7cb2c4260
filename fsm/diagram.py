"""State diagrams as SVG, drawn from the tables.

Where a box stands is written here by hand (`PLACES`), because five small diagrams do not need a layout engine; what is
drawn between the boxes comes from the table, and a state without a place is an error. States stand in frames by group
(ingress, egress, …); terminal ones have a double border. An event that every live state has, with one target, is
drawn once, from a box "any live state". The ring's twenty states are the product of two facts, so it is drawn as two
projections of the same table: how full it is, and which ends are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from typing import Any, Final
from xml.sax.saxutils import escape

from .exports import edges
from .machine import Machine

Place = tuple[float, float]

BOX_W, BOX_H, COLUMN, ROW, MARGIN = 160, 34, 290, 62, 46
ANY_LIVE: Final = "any live state"
GROUP_FILL: Final = {"ingress": "#e3edfa", "egress": "#e2f3e6", "terminal": "#f1ebf8"}

PLACES: Final[dict[str, dict[str, Place]]] = {
    "request": {
        "RECEIVED": (0, 1),
        "VALIDATING": (1, 1),
        "NORMALIZING": (2, 1),
        "ENCODING": (3, 0),
        "TOKENIZING": (3, 1),
        "PRE_SEND_VALIDATING": (4, 1),
        "QUEUED": (4, 5),
        "STREAMING": (3, 5),
        "FINALIZING": (2, 5),
        "COMPLETED": (0.9, 5),
        "FAILED": (0.9, 6.4),
        "ABORTED": (0.9, 7.8),
        ANY_LIVE: (2, 7.1),
    },
    "abort": {
        "NOT_PUSHED": (0, 0),
        "CANCELLED_LOCALLY": (0, 3),
        "PUSHED": (1.1, 0),
        "REQUESTED": (2.1, 0),
        "NOT_NEEDED": (1.1, 3),
        "NOTIFIED": (2.1, 3),
        "UNDELIVERABLE": (3.1, 3),
    },
    "ring-fill": {
        "EMPTY": (0, 3.2),
        "PARTIAL": (1.2, 1.5),
        "FULL": (2.4, 1.5),
        "PARTIAL_STASHED": (1.2, 5),
        "FULL_STASHED": (2.4, 5),
    },
    "ring-ends": {"OPEN": (0, 1), "PRODUCER_GONE": (1.3, 0), "CONSUMER_GONE": (1.3, 2), "CLOSED": (2.6, 1)},
    "sink": {
        "OPEN": (0, 2.2),
        "DONE": (1.5, 0.6),
        "FAILED": (1.5, 1.7),
        "OVERFLOWED": (1.5, 2.8),
        "CLOSED": (1.5, 3.9),
    },
    "lifecycle": {
        "CREATED": (0, 0),
        "STARTING": (1, 0),
        "RUNNING": (2, 0),
        "DRAINING": (2, 2.5),
        "STOPPING": (1, 2.5),
        "STOPPED": (1, 5),
        "FAILED": (2, 5),
    },
}

# How far an edge's middle is pushed sideways (px, to the right of its direction), where a straight line would not do.
BENDS: Final[dict[tuple[str, str, str], float]] = {
    ("request", "NORMALIZING", "PRE_SEND_VALIDATING"): 95,
    ("request", "VALIDATING", "PRE_SEND_VALIDATING"): 190,
    ("request", "QUEUED", "COMPLETED"): -130,
    ("ring-fill", "EMPTY", "FULL"): -290,
    ("ring-fill", "PARTIAL", "PARTIAL_STASHED"): 70,
    ("ring-fill", "PARTIAL_STASHED", "PARTIAL"): 70,
    ("ring-fill", "FULL", "EMPTY"): -60,
    ("ring-fill", "FULL_STASHED", "EMPTY"): -170,
    ("lifecycle", "RUNNING", "FAILED"): -260,
    ("lifecycle", "STARTING", "FAILED"): -70,
}


@dataclass(slots=True)
class Picture:
    """What to draw: nodes by group, the start, the ends, and labelled edges."""

    name: str
    title: str
    groups: Mapping[str, Sequence[str]]
    start: str
    terminal: frozenset[str]
    arrows: dict[tuple[str, str], list[str]] = field(default_factory=dict)


def pictures(machine: Machine[Any, Any]) -> dict[str, str]:
    """The machine's diagrams: name -> SVG text."""
    parts = _ring(machine) if machine.name == "ring" else [_whole(machine)]
    return {picture.name: _draw(picture) for picture in parts}


def _whole(machine: Machine[Any, Any]) -> Picture:
    picture = Picture(
        machine.name,
        machine.about,
        {group: [state.name for state in members] for group, members in machine.groups.items()},
        machine.initial.name,
        frozenset(state.name for state in machine.terminal),
    )
    live = [state for state in machine.states if state not in machine.terminal]
    everywhere = {
        event
        for event in machine.events
        if ANY_LIVE in PLACES[machine.name]
        and all(machine.outcome(state, event) == "move" for state in live)
        and len({machine.next(state, event) for state in live}) == 1
    }
    for event in machine.events:
        if event in everywhere:
            picture.arrows[ANY_LIVE, machine.next(live[0], event).name] = [event.name]
    for (state, to), events in edges(machine).items():
        if labels := [event.name for event in events if event not in everywhere]:
            picture.arrows[state.name, to.name] = labels
    return picture


def _ring(machine: Machine[Any, Any]) -> list[Picture]:
    ends = ("OPEN", "PRODUCER_GONE", "CONSUMER_GONE", "CLOSED")

    def split(name: str) -> tuple[str, str]:
        end = next(end for end in ends if name.endswith(f"_{end}"))
        return name.removesuffix(f"_{end}"), end

    fills = list(dict.fromkeys(split(state.name)[0] for state in machine.states))
    fill = Picture("ring-fill", "How full a ring is, while both ends are there.", {"open": fills}, "EMPTY", frozenset())
    end = Picture("ring-ends", "Which ends of a ring are there, however full.", {"ends": ends}, "OPEN", frozenset())
    for (state, to), events in edges(machine).items():
        (before, end_before), (after, end_after) = split(state.name), split(to.name)
        labels = [event.name for event in events]
        if end_before != end_after:
            end.arrows[end_before, end_after] = labels
        elif end_before == "OPEN":
            fill.arrows[before, after] = labels
    return [fill, end]


def _draw(picture: Picture) -> str:
    places = PLACES[picture.name]
    names = [name for members in picture.groups.values() for name in members]
    names += [ANY_LIVE] if any(source == ANY_LIVE for source, _ in picture.arrows) else []
    centre = {
        name: (MARGIN + BOX_W / 2 + places[name][0] * COLUMN, 66 + BOX_H / 2 + places[name][1] * ROW) for name in names
    }
    right, bottom = max(x for x, _ in centre.values()), max(y for _, y in centre.values())
    below, labels = [], []
    for (source, target), events in picture.arrows.items():
        bend = BENDS.get((picture.name, source, target))
        if bend is None:
            bend = 24 if (target, source) in picture.arrows else 0
        path, at = _loop(centre[source]) if source == target else _curve(centre[source], centre[target], bend)
        below.append(f'<path class="edge" d="{path}"/>')
        labels.append(_text(at, events))
        right, bottom = max(right, at[0] - 20), max(bottom, at[1] - 10)
    width, height = round(right + BOX_W / 2 + MARGIN), round(bottom + BOX_H / 2 + MARGIN)
    frames, boxes = [], []
    for group, members in picture.groups.items():
        xs, ys = [centre[name][0] for name in members], [centre[name][1] for name in members]
        left, top = min(xs) - BOX_W / 2 - 14, min(ys) - BOX_H / 2 - 14
        size = f'width="{max(xs) - min(xs) + BOX_W + 28:g}" height="{max(ys) - min(ys) + BOX_H + 28:g}"'
        frames.append(f'<rect class="frame" x="{left:g}" y="{top:g}" {size} rx="10"/>')
        frames.append(f'<text class="group" x="{left + 8:g}" y="{top - 5:g}">{escape(group)}</text>')
        boxes += [
            _box(name, centre[name], GROUP_FILL.get(group, "#f2f2f2"), name in picture.terminal) for name in members
        ]
    if ANY_LIVE in centre:
        boxes.append(_box(ANY_LIVE, centre[ANY_LIVE], "#ffffff", False, dashed=True))
    x, y = centre[picture.start]
    start = [
        f'<circle cx="{x - BOX_W / 2 - 26:g}" cy="{y:g}" r="5" fill="#333"/>',
        f'<path class="edge" d="M{x - BOX_W / 2 - 21:g},{y:g} L{x - BOX_W / 2:g},{y:g}"/>',
    ]
    style = (
        "text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;fill:#1b1b1b}"
        ".edge{fill:none;stroke:#555;stroke-width:1.3;marker-end:url(#a)}"
        ".label{font-size:10.5px;text-anchor:middle;paint-order:stroke;stroke:#fff;stroke-width:4px;fill:#333}"
        ".frame{fill:#fbfbfb;stroke:#bbb;stroke-dasharray:5 4}.group{font-size:11px;fill:#666}"
        ".name{text-anchor:middle}.title{font-size:13px}"
    )
    marker = (
        '<marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,1 L10,5 L0,9 z" fill="#555"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<title>{escape(picture.name)}: {escape(picture.title)}</title>",
            f"<style>{style}</style><defs>{marker}</defs>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text class="title" x="14" y="22">{escape(picture.title)}</text>',
            *frames,
            *start,
            *below,
            *boxes,
            *labels,
            "</svg>",
            "",
        ]
    )


def _box(name: str, at: Place, fill: str, terminal: bool, *, dashed: bool = False) -> str:
    x, y = at[0] - BOX_W / 2, at[1] - BOX_H / 2
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    out = f'<rect x="{x:g}" y="{y:g}" width="{BOX_W}" height="{BOX_H}" rx="7" fill="{fill}" stroke="#444"{dash}/>'
    if terminal:
        inner = f'width="{BOX_W - 6}" height="{BOX_H - 6}" rx="5" fill="none" stroke="#444"'
        out += f'<rect class="terminal" x="{x + 3:g}" y="{y + 3:g}" {inner}/>'
    return f'{out}<text class="name" x="{at[0]:g}" y="{at[1] + 4:g}">{escape(name)}</text>'


def _text(at: Place, lines: Sequence[str]) -> str:
    top = at[1] + 4 - 12 * (len(lines) - 1) / 2
    return "".join(
        f'<text class="label" x="{at[0]:.1f}" y="{top + 12 * index:.1f}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )


def _border(centre: Place, towards: Place) -> Place:
    """Where the line from a box's centre leaves the box."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    scale = min(BOX_W / 2 / abs(dx) if dx else 1e9, BOX_H / 2 / abs(dy) if dy else 1e9)
    return centre[0] + dx * scale, centre[1] + dy * scale


def _curve(source: Place, target: Place, bend: float) -> tuple[str, Place]:
    dx, dy = target[0] - source[0], target[1] - source[1]
    length = hypot(dx, dy)
    control = (
        (source[0] + target[0]) / 2 - dy / length * bend,
        (source[1] + target[1]) / 2 + dx / length * bend,
    )
    start, stop = _border(source, control), _border(target, control)
    middle = [(a + 2 * c + b) / 4 for a, c, b in zip(start, control, stop, strict=True)]
    if abs(dy) < BOX_H / 2 and not bend:
        middle[1] -= 10  # beside a level line and not on it, or a long label hides a short arrow
    path = f"M{start[0]:.1f},{start[1]:.1f} Q{control[0]:.1f},{control[1]:.1f} {stop[0]:.1f},{stop[1]:.1f}"
    return path, (middle[0], middle[1])


def _loop(at: Place) -> tuple[str, Place]:
    x, y = at[0], at[1] - BOX_H / 2
    return f"M{x - 22:.1f},{y:.1f} C{x - 40:.1f},{y - 44:.1f} {x + 40:.1f},{y - 44:.1f} {x + 22:.1f},{y:.1f}", (
        x,
        y - 40,
    )
