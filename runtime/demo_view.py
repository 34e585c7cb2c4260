"""How the demo looks: the live view in a terminal, the lines in a pipe, and the summary of both.

Owns: words and layout. It reads a `Board` and changes nothing. Rules it keeps:

* Prompts and answers are shown with every control character made visible: a prompt file must not be able to move the
  cursor or to pass for the demo's own words.
* A line of the view never wraps, so that the view keeps its height and redraws in place; text shows its newest end.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .demo import Board, Client

_BAR: Final = 24
_LINES_BESIDE: Final = 10  # lines of the view that are not answers


def printable(text: str) -> str:
    """`text` on one line, harmless: line ends become a visible mark, other control and format characters their code."""
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else " " if c in "\t\r" else _code(c) for c in text)


def _code(c: str) -> str:
    if unicodedata.category(c) == "Zs":
        return c  # unusual spaces, not printable in Python's sense, do no harm
    return f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" if ord(c) < 65536 else f"\\U{ord(c):08x}"


def answer_line(client: Client) -> str:
    """A finished request as one line: number, prompt, answer, how it ended."""
    head = f"[{client.number + 1}] {printable(client.prompt)} |"
    if client.outcome != "completed":
        return f"{head}{printable(client.text)} ({client.outcome}: {printable(client.reason)})"
    return f"{head}{printable(client.text)} ({client.reason}, {client.tokens} tokens)"


def quantile(values: list[float], q: float) -> float | None:
    """The smallest of `values` that at least the share `q` of them does not exceed; None of an empty list."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def summary_lines(board: Board) -> list[str]:
    """The summary, line by line."""
    outcomes = board.outcomes
    ended = [client.ended for client in board.clients if client.ended is not None]
    unfinished = len(board.clients) - sum(outcomes.values())
    seconds = max(ended) - board.began if ended and not unfinished else board.now - board.began
    waits = [
        client.first - client.began for client in board.clients if client.first is not None and client.began is not None
    ]
    tokens_in = sum(client.prompt_tokens for client in board.clients)
    speed = f"{board.tokens / seconds:,.0f}" if seconds > 0 else "-"
    parts = [f"{outcomes['completed']} completed", f"{outcomes['failed']} failed", f"{outcomes['refused']} refused"]
    if unfinished:
        parts.append(f"{unfinished} not finished")
    ends = Counter(client.reason.split(" ")[0] for client in board.clients if client.outcome == "completed")
    lines = [
        "",
        f"requests        {len(board.clients)}: {', '.join(parts)}",
        f"ended by        {', '.join(f'{reason} {n}' for reason, n in sorted(ends.items())) or '-'}",
        f"tokens          {tokens_in:,} in, {board.tokens:,} out",
        f"speed           {speed} tokens/s over {seconds:.2f} s",
        f"first token     p50 {_ms(quantile(waits, 0.5))}, p99 {_ms(quantile(waits, 0.99))}",
        f"states reached  {', '.join(f'{name} {n}' for name, n in board.states.items()) or '-'}",
        f"decoder         {board.decoder or '-'}",
    ]
    if board.steps is not None:
        whole = "" if board.recorded_all else " (only the first ones were recorded)"
        lines.append(f"state machines  {board.steps:,} steps{whole}, {len(board.violations)} against the tables")
        lines += [f"violation       {printable(violation)}" for violation in board.violations[:5]]
    errors = Counter(client.reason for client in board.clients if client.outcome in ("failed", "refused"))
    lines += [f"error           {n} x {printable(reason)}" for reason, n in errors.most_common(5)]
    return lines


class LiveView:
    """Redraws the board in place until `stop`; the last picture stays on the screen."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._before: tuple[float, int] | None = None
        self._speed = 0.0

    def start(self) -> None:
        """Begin to draw."""
        self._live.start()

    def show(self, board: Board) -> None:
        """Draw `board` now."""
        self._live.update(self.picture(board), refresh=True)

    def stop(self) -> None:
        """Leave the last picture and the cursor below it."""
        self._live.stop()

    def picture(self, board: Board) -> RenderableType:
        """The view as something that rich can draw."""
        now, tokens = board.now, board.tokens
        if self._before is not None and now > self._before[0]:
            speed = (tokens - self._before[1]) / (now - self._before[0])
            self._speed = speed if self._speed == 0 else 0.7 * self._speed + 0.3 * speed
        self._before = (now, tokens)
        room = max(3, self._console.height - _LINES_BESIDE)
        return Group(
            Text(board.title, style="bold", no_wrap=True, overflow="ellipsis"),
            self._facts(board),
            Text(""),
            self._answers(board, room),
        )

    def _facts(self, board: Board) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
        outcomes = board.outcomes
        waiting = len(board.clients) - len(board.running) - sum(outcomes.values())
        live = board.stats.live if board.stats is not None else {}
        states = "  ".join(f"{name} {n}" for name, n in live.items() if n) or "none"
        table.add_row("live requests", Text(states, overflow="ellipsis"))
        done = Text(f"{outcomes['completed']} completed", style="green")
        for name in ("failed", "refused"):
            if outcomes[name]:
                done.append(f"  {outcomes[name]} {name}", style="red")
        done.append(f"  {waiting} not yet submitted", style="dim")
        table.add_row("requests", done)
        for name in ("ingress_ring", "egress_ring"):
            ring = getattr(board.stats, name, None)
            if ring is not None:
                full = min(_BAR, math.ceil(_BAR * ring.fill / ring.capacity))
                on, off = "#." if self._console.options.ascii_only else "█░"
                bar = f"{on * full}{off * (_BAR - full)} {ring.fill} of {ring.capacity}"
                table.add_row(name.replace("_", " "), bar)
        table.add_row("tokens", f"{board.tokens:,} out, {self._speed:,.0f}/s, {board.now - board.began:.1f} s")
        table.add_row("decoder", board.decoder or "-")
        return table

    def _answers(self, board: Board, room: int) -> Table:
        """As many answers as there is room for: first those that are running, then the newest that ended."""
        chosen = sorted(board.running.values(), key=lambda client: (client.first is None, client.number))[:room]
        if len(chosen) < room:
            chosen += list(board.recent)[len(chosen) - room :]
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(justify="right", style="dim", no_wrap=True, width=len(str(len(board.clients))))
        table.add_column(no_wrap=True, ratio=1)
        table.add_column(style="dim", no_wrap=True, width=14)
        width = max(20, self._console.width - 22)
        for client in sorted(chosen, key=lambda client: client.number):
            table.add_row(str(client.number + 1), _line(client, width), _mark(client))
        return table


def _mark(client: Client) -> Text:
    if client.outcome == "completed":
        return Text(f"{client.reason.split(' ')[0]}, {client.tokens}", style="green", overflow="ellipsis")
    if client.outcome is not None:
        return Text(client.outcome, style="red")
    return Text("waiting" if client.first is None else f"{client.tokens} tokens", overflow="ellipsis")


def _line(client: Client, width: int) -> Text:
    if client.outcome in ("failed", "refused"):
        return Text(printable(client.reason), style="red", overflow="ellipsis")
    prompt, text = Text(printable(client.prompt), style="dim"), Text(printable(client.text))
    over = prompt.cell_len + text.cell_len - width
    if over <= 0:
        return Text.assemble(prompt, text)
    # The newest text must stay in sight, so the beginning of the whole line goes first.
    whole = Text.assemble(prompt, text)
    plain = whole.plain
    cut = 0
    while cut < len(plain) and Text(plain[cut:]).cell_len > width - 1:
        cut += max(1, (Text(plain[cut:]).cell_len - (width - 1)) // 2)
    return Text.assemble(Text("…", style="dim"), whole[cut:])
