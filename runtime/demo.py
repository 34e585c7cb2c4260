"""``headrace demo``: many prompts at once through a whole manager, with an embedded scheduler on a thread of its own.

Owns: the demo's options, its clients and its numbers; `demo_view.py` owns how they look. Rules it keeps:

* It is a client like any other: it uses `TokenizerManager` and nothing below it.
* No request is lost silently. A refused or failed one is shown with its reason, counted in the summary, and makes the exit
  status 1. At most `in_flight` requests are out at once (by default as many as the ingress ring holds, so none is refused).
* Mistakes in options and files are found before a thread is started, and are one line each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import specs
from ..codec.errors import HeadraceError, QueueFullError, ValidationError, show
from ..codec.finish import FinishReason
from ..codec.sampling import SamplingParams
from ..fsm import RequestState, TraceEvent, validate
from .config import RuntimeConfig
from .demo_view import LiveView, answer_line, summary_lines
from .manager import TokenizerManager
from .markov import NgramModel, join_paragraphs
from .schedulers import EchoScheduler, MarkovScheduler, Scheduler
from .text.tokenize import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCHEDULERS: Final = ("echo", "markov")
_MOST_IN_FLIGHT: Final = 1024
_LIVE_STEP_MS: Final = 20.0  # slow enough to be read, fast enough for 200 prompts in a few seconds
_MOST_STEP_MS: Final = 60_000.0
_REDRAW_S: Final = 0.1
_TRACE_STEPS: Final = 250_000
# The names under which tokenizers keep their end of sequence; which token ends a text is not in tokenizer.json itself.
_EOS_NAMES: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "[SEP]")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line says; see ``headrace demo --help`` for each."""

    file: str | None = None
    tokenizer: str | None = None
    scheduler: str = "markov"
    text: str | None = None
    prompts: int | None = None
    max_new_tokens: int = 96
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95
    seed: int = 0
    stop: tuple[str, ...] = ()
    max_batch: int = 64
    in_flight: int | None = None
    ring: int | None = None
    shards: int = 1
    wire: str = "v1"
    context_len: int = 8192
    step_ms: float | None = None
    trace: str | None = None
    plain: bool = False


@dataclass(slots=True)
class Client:
    """One request as its client sees it. Times are seconds of the board's clock; `outcome` is None while it is out."""

    number: int
    prompt: str
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    began: float | None = None
    first: float | None = None
    ended: float | None = None
    outcome: str | None = None  # completed, refused or failed
    reason: str = ""


@dataclass
class Board:
    """The demo's state: its clients and what the manager last said of itself. Written by the demo's one loop only."""

    title: str
    clients: list[Client]
    began: float
    now: float
    token_name: Callable[[int], str | None]
    stats: Any = None
    decoder: str = ""
    states: dict[str, int] = field(default_factory=dict)  # how many requests were in each state, in the table's order
    steps: int | None = None  # steps of all machines that were recorded
    violations: list[str] = field(default_factory=list)
    recorded_all: bool = True

    # Kept beside the clients, because a picture ten times a second must not walk over a million of them.
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    running: dict[int, Client] = field(default_factory=dict)
    recent: deque[Client] = field(default_factory=lambda: deque(maxlen=256))

    def begin(self, client: Client, now: float) -> None:
        """`client` submits its request."""
        client.began = now
        self.running[client.number] = client

    def end(self, client: Client, now: float, outcome: str, reason: str) -> None:
        """`client` has its answer, or a refusal or error."""
        client.ended, client.outcome, client.reason = now, outcome, reason
        self.outcomes[outcome] += 1
        self.running.pop(client.number, None)
        self.recent.append(client)


def run(options: DemoOptions) -> int:
    """The whole command; returns its exit status. Raises HeadraceError or OSError for a mistake of the user."""
    if options.scheduler not in SCHEDULERS:
        raise ValidationError(f"--scheduler must be one of {', '.join(SCHEDULERS)}, not {show(options.scheduler)}")
    if options.max_new_tokens >= options.context_len:
        raise ValidationError(
            f"--max-new-tokens {options.max_new_tokens} leaves no room for a prompt in a --context-len of {options.context_len}"
        )
    if options.step_ms is not None and not 0 <= options.step_ms <= _MOST_STEP_MS:
        raise ValidationError(f"--step-ms must be in 0..{_MOST_STEP_MS:.0f}, not {options.step_ms}")
    if options.text is not None and options.scheduler != "markov":
        raise ValidationError("--text is what --scheduler markov learns from; echo has no use for it")
    live = not options.plain and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    prompts = choose_prompts(read_prompts(options.file), options.prompts)
    # Checked as a whole before anything is started: every request has the same parameters but for its seed.
    params = [sampling(options, number) for number in range(len(prompts))]
    tokenizer = load_tokenizer(
        options.tokenizer if options.tokenizer is not None else str(specs.path("data", "tokenizer.json"))
    )
    config = _config(options, tokenizer)
    for extreme in (params[0], params[-1]):  # the seeds in between lie between theirs
        extreme.normalize(vocab_size=tokenizer.get_vocab_size())
    model = _model(options, tokenizer) if options.scheduler == "markov" else None
    tm = TokenizerManager(config)
    board = Board(
        title=f"headrace demo, {options.scheduler}, wire {options.wire}, {len(prompts)} prompts",
        clients=[Client(number, prompt) for number, prompt in enumerate(prompts)],
        began=time.monotonic(),
        now=time.monotonic(),
        token_name=tokenizer.id_to_token,
    )
    step_ms = options.step_ms if options.step_ms is not None else _LIVE_STEP_MS if live else 0.0
    scheduler = _scheduler(tm, options, model, tokenizer, step_ms / 1000)
    clients = min(len(prompts), options.in_flight or min(config.ingress_ring_capacity, _MOST_IN_FLIGHT))
    if options.trace is not None:
        _write_trace(tm, options.trace)  # now too: that it cannot be written should not be learnt at the end
    try:
        asyncio.run(_serve(board, tm, scheduler, params, clients, live))
    except KeyboardInterrupt:
        _finish(board, tm, options.trace)
        raise
    return _finish(board, tm, options.trace)


def _write_trace(tm: TokenizerManager, file: str) -> None:
    if tm.trace is not None:
        try:
            tm.trace.write(file)
        except OSError as error:
            raise ValidationError(f"--trace {show(file)} cannot be written: {error.strerror}") from None
        except ValueError:
            raise ValidationError(f"--trace {show(file)} is not the name of a file") from None


def _finish(board: Board, tm: TokenizerManager, trace: str | None) -> int:
    if trace is not None:
        _write_trace(tm, trace)
    board.now = time.monotonic()
    _read_trace(board, tm)
    print("\n".join(summary_lines(board)), flush=True)
    return 0 if board.outcomes["completed"] == len(board.clients) and not board.violations else 1


# ---- what the user gives


def read_prompts(file: str | None) -> list[str]:
    """The prompts of `file` ("-": standard input; None: the built-in set), one per line; blank lines are left out."""
    name = "standard input" if file == "-" else show(file)
    try:
        if file is None:
            data = specs.path("data", "prompts.txt").read_bytes()
        elif file == "-":
            if sys.stdin is None:
                raise ValidationError("standard input is closed")
            data = sys.stdin.buffer.read()
        else:
            data = Path(file).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ValidationError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        # UnicodeDecodeError says where; a NUL in a file's name is a plain ValueError
        at = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise ValidationError(f"{name} is not text in UTF-8{at}") from None
    prompts = [line for line in (line.rstrip("\r") for line in text.split("\n")) if line.strip()]
    if not prompts:
        raise ValidationError(f"{name} holds no prompt: one per line is expected")
    return prompts


def choose_prompts(prompts: Sequence[str], count: int | None) -> list[str]:
    """`count` prompts: the first ones, or all of them again and again; None: as they are."""
    return list(prompts) if count is None else [prompts[i % len(prompts)] for i in range(count)]


def sampling(options: DemoOptions, number: int) -> SamplingParams:
    """The parameters of request `number`. Each has a seed of its own, or equal prompts would get equal answers."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        sampling_seed=options.seed + number,
        stop=list(options.stop) or None,
    )


def eos_id(tokenizer: Tokenizer) -> int | None:
    """The token that ends a text in `tokenizer`, by the usual names; None where it has none of them."""
    for name in _EOS_NAMES:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return int(token)
    return None


def _config(options: DemoOptions, tokenizer: Tokenizer) -> RuntimeConfig:
    sizes: dict[str, Any] = {} if options.ring is None else {"ingress_ring_capacity": options.ring}
    config = RuntimeConfig(
        tokenizer=tokenizer,
        wire=options.wire,
        context_len=options.context_len,
        detokenizer_shards=options.shards,
        trace=True,
        trace_capacity=_TRACE_STEPS,
        **sizes,
    )
    config.schema()  # a wrong --wire is found here, before a thread is started
    return config.checked()


def _model(options: DemoOptions, tokenizer: Tokenizer) -> NgramModel:
    path = Path(options.text) if options.text is not None else specs.path("data", "text.txt")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValidationError(f"--text {show(str(path))} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValidationError(f"--text {show(str(path))} is not text in UTF-8") from None

    paragraphs = tokenizer.encode_batch([line for line in text.splitlines() if line.strip()], add_special_tokens=False)
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    ids = join_paragraphs([paragraph.ids for paragraph in paragraphs], eos_id(tokenizer), newline)
    if ids.size < 2:
        raise ValidationError(f"--text {show(str(path))} holds no text to learn from")
    return NgramModel(ids)


# ---- the run


def _scheduler(
    tm: TokenizerManager, options: DemoOptions, model: NgramModel | None, tokenizer: Tokenizer, step_s: float
) -> Scheduler:
    if model is None:
        return EchoScheduler(tm.scheduler, tokenizer=tokenizer, max_batch=options.max_batch, step_interval_s=step_s)
    eos = eos_id(tokenizer)
    return MarkovScheduler(
        tm.scheduler,
        model,
        tokenizer=tokenizer,
        eos_token_ids=() if eos is None else (eos,),
        seed=options.seed,
        max_batch=options.max_batch,
        step_interval_s=step_s,
    )


async def _serve(
    board: Board, tm: TokenizerManager, scheduler: Scheduler, params: list[SamplingParams], clients: int, live: bool
) -> None:
    todo = iter(zip(board.clients, params, strict=True))
    try:
        async with tm:
            scheduler.start()
            board.began = board.now = time.monotonic()
            everyone = asyncio.gather(*(_client(tm, board, todo) for _ in range(clients)))
            watch = asyncio.ensure_future(_watch(tm, board, live))
            try:
                # The watcher never ends by itself; if it does (the reader of a pipe went away), that is the demo's end.
                await asyncio.wait((everyone, watch), return_when=asyncio.FIRST_COMPLETED)
            finally:
                watch.cancel()
                everyone.cancel()
                with suppress(asyncio.CancelledError):
                    await everyone
                with suppress(asyncio.CancelledError):
                    await watch
    finally:
        scheduler.stop()  # after the manager: while that drains, there must be someone to hear its aborts


def _read_trace(board: Board, tm: TokenizerManager) -> None:
    """Which states the requests went through, and whether every recorded step is one that the machines allow."""
    if tm.trace is None:
        return
    reached: dict[str, set[str]] = {state.name: set() for state in RequestState}
    for event in tm.trace:
        if isinstance(event, TraceEvent) and event.machine == "request":
            reached[event.before].add(event.rid)
            reached[event.after].add(event.rid)
    board.states = {name: len(rids) for name, rids in reached.items() if rids}
    board.steps = len(tm.trace)
    board.violations = [str(violation) for violation in validate(tm.trace)]
    board.recorded_all = not tm.trace.full


async def _client(tm: TokenizerManager, board: Board, todo: Any) -> None:
    """Serves prompts from `todo`, one after the other, until there are none."""
    for client, params in todo:
        board.begin(client, time.monotonic())
        reason: FinishReason | None = None
        try:
            async for chunk in tm.generate(client.prompt, params):
                if client.first is None:
                    client.first = time.monotonic()
                client.text += chunk.text
                client.tokens += len(chunk.token_ids)
                board.tokens += len(chunk.token_ids)
                client.prompt_tokens = chunk.prompt_tokens
                reason = chunk.finish_reason
        except HeadraceError as error:
            outcome = "refused" if isinstance(error, QueueFullError) else "failed"
            board.end(client, time.monotonic(), outcome, f"{error.http_status} {error.code}: {error.message}")
        else:
            # Without a reason the stream broke its promise of a terminal chunk; that must not look like an answer.
            outcome = "completed" if reason is not None else "failed"
            words = "no finish reason came" if reason is None else _words(reason, board.token_name)
            board.end(client, time.monotonic(), outcome, words)


async def _watch(tm: TokenizerManager, board: Board, live: bool) -> None:
    """Looks at the manager ten times a second and shows what it sees, in the live view or as answers in their order."""
    view = LiveView() if live else None
    printed = 0

    def look() -> None:
        nonlocal printed
        board.now = time.monotonic()
        board.stats = tm.stats()
        board.decoder = board.stats.decoder
        if view is not None:
            view.show(board)
            return
        while printed < len(board.clients) and board.clients[printed].ended is not None:
            print(answer_line(board.clients[printed]), flush=True)
            printed += 1

    try:
        if view is not None:
            view.start()
        while True:
            look()
            await asyncio.sleep(_REDRAW_S)
    finally:
        look()
        if view is not None:
            view.stop()


def _words(reason: FinishReason, token_name: Callable[[int], str | None]) -> str:
    matched = reason.matched
    if matched is None:
        return type(reason).__name__.lower()
    name = token_name(matched) if isinstance(matched, int) else None
    return f"stop at {show(matched) if name is None else name}"
