"""Fuzzing as a product: ours or somebody else's decoder of these frames, with findings that replay.

Owns: how a target is run, what counts as a finding, how one is made small, written down and replayed, and the export for other
fuzzers. Rules it keeps:

* Returning means accepted; the class named as the refusal means rejected; any other exception, a hang, memory past the limit,
  another exit status, and (with the oracle) another verdict than ours is a finding. Nothing is swallowed.
* Coverage-guided with atheris where it is installed, else Hypothesis's own engine with the target's strategies; the report says
  which. Both count what they ran; a run of no cases is not a success.
* Every finding is one crash file, minimised, and one line that replays it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import resource
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from .decode import decode_frame
from .errors import FrameError, ValidationError, show
from .fuzz_targets import TARGETS as _TARGETS
from .fuzz_targets import Rejected, Target, digest, frame_inputs, frame_seeds, target_named
from .schema import WireSchema, load_schema

MIB: Final = 1 << 20


def _total(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        with contextlib.suppress(Rejected):
            run(data)

    return target


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {name: _total(target.run) for name, target in _TARGETS.items()}
"""The targets of headrace by name, each a callable bytes -> None that raises only where there is a fault."""


class Finding(NamedTuple):
    """One fault. `kind`: exception, hang, memory, verdict or exit; `where`: what tells it from other faults; `data`: the input."""

    kind: str
    where: str
    message: str
    data: bytes
    path: str = ""
    replay: str = ""


class FuzzReport(NamedTuple):
    """What a run did: engine, executions, accepted, rejected, seconds, findings (distinct), whether its budget was used whole."""

    target: str
    engine: str
    executions: int
    accepted: int
    rejected: int
    seconds: float
    findings: list[Finding]
    complete: bool

    def lines(self) -> list[str]:
        """The report in words."""
        head = (
            f"{self.target}: engine {self.engine}, {self.executions} cases ({self.accepted} accepted, {self.rejected} rejected) in "
            f"{self.seconds:.1f} s, {len(self.findings)} findings, complete={str(self.complete).lower()}"
        )
        found = [f"{f.kind}: {f.message}\n  {f.path}\n  replay: {f.replay}" for f in self.findings]
        return [head, *(line for text in found for line in text.splitlines())]


class _Hang(BaseException):
    """Raised by the timer inside a case; no target can mistake it for its own error."""


def _lower_peak() -> None:
    """Set the process's peak of resident memory to what it uses now, where the system can (Linux)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:  # no such file, or not ours to write: then only growth over the old peak is seen
        return


class Subject:
    """A decoder under test: `judge(data)` gives "accept", "reject" or a Finding."""

    def __init__(
        self,
        name: str,
        run: Callable[[bytes], object],
        *,
        rejects: tuple[type[BaseException], ...] = (Rejected,),
        oracle: WireSchema | None = None,
        hang_s: float = 10.0,
        memory_bytes: int = 256 * MIB,
    ) -> None:
        self.name = name
        self.run = run
        self.rejects = rejects
        self.oracle = oracle
        self.hang_s = hang_s
        self.memory_bytes = memory_bytes
        _lower_peak()  # what the process used before must not hide what a case uses

    def judge(self, data: bytes) -> str | Finding:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with _timer(self.hang_s):
                self.run(data)
            verdict = "accept"
        except self.rejects:
            verdict = "reject"
        except _Hang:
            return Finding("hang", "hang", f"no answer within {self.hang_s:g} s", data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except MemoryError:
            return Finding("memory", "memory", "MemoryError", data)
        except BaseException as fault:
            where, why = _place(fault), show(str(fault)).strip("'\"")
            return Finding(
                "exception", f"{type(fault).__name__} {where}", f"{type(fault).__name__}: {why} ({where})", data
            )
        # The process's high-water mark: a case that raises it by more than the limit has used that much. One that raised it by less
        # must not hide the next one, so the mark is lowered again.
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if grown > self.memory_bytes // 4:
            _lower_peak()
        if grown > self.memory_bytes:
            return Finding("memory", "memory", f"{grown // MIB} MiB more for an input of {len(data)} bytes", data)
        return self._compare(verdict, data)

    def _compare(self, verdict: str, data: bytes) -> str | Finding:
        if self.oracle is None:
            return verdict
        expected, reason = "accept", "a valid frame"
        try:
            decode_frame(data, self.oracle)
        except FrameError as error:
            expected, reason = "reject", error.reason
        if expected == verdict:
            return verdict
        return Finding(
            "verdict", f"{verdict} {reason}", f"it says {verdict}, headrace says {expected} ({reason})", data
        )


class CommandSubject(Subject):
    """A decoder in any language: the frame on standard input; exit status 0 accepts, 1 rejects, anything else is a finding."""

    def __init__(
        self, command: str, *, oracle: WireSchema | None = None, hang_s: float = 10.0, memory_bytes: int = 1024 * MIB
    ) -> None:
        super().__init__(command, self._never, oracle=oracle, hang_s=hang_s, memory_bytes=memory_bytes)
        self.argv = shlex.split(command)
        if not self.argv:
            raise ValidationError("the command of the target is empty", field="target_cmd")

    @staticmethod
    def _never(data: bytes) -> None:
        raise NotImplementedError

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (self.memory_bytes, self.memory_bytes))

    def judge(self, data: bytes) -> str | Finding:
        try:
            done = subprocess.run(
                self.argv, input=data, capture_output=True, timeout=self.hang_s, preexec_fn=self._limit, check=False
            )
        except subprocess.TimeoutExpired:
            return Finding("hang", "hang", f"no answer within {self.hang_s:g} s", data)
        except OSError as error:
            raise ValidationError(f"{show(self.argv[0])} cannot be run: {error.strerror}", field="target_cmd") from None
        if done.returncode in (0, 1):
            return self._compare("accept" if done.returncode == 0 else "reject", data)
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return Finding("exit", how, f"{how}{': ' + show(last[0]) if last else ''}", data)


@contextlib.contextmanager
def _timer(seconds: float) -> Iterator[None]:
    """Raises _Hang in the body after `seconds`. Signals reach the main thread only; elsewhere there is no timer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _Hang

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _place(fault: BaseException) -> str:
    """file:line where it was raised: what tells one fault from another."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "?"
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def load_object(spec: str) -> Any:
    """The object that ``module:name`` names. ValidationError in one line when there is none."""
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValidationError(f"{show(spec)} names nothing: {show(str(error))}", field="target") from None
    return found


def minimise(subject: Subject, finding: Finding, *, budget: int = 400, seconds: float = 10.0) -> Finding:
    """The smallest input found that shows the same fault: blocks taken out, then bytes set to zero. At most `budget` tries."""
    best, tries, end = finding, 0, time.monotonic() + seconds
    if finding.kind in ("hang", "memory"):
        return finding  # each try would cost the whole time limit; a high-water mark shows a case only once

    def same(data: bytes) -> bool:
        nonlocal best, tries
        tries += 1
        got = subject.judge(data)
        if isinstance(got, Finding) and (got.kind, got.where) == (finding.kind, finding.where):
            best = got
            return True
        return False

    size = max(1, len(best.data) // 2)
    while tries < budget and time.monotonic() < end:
        at, shrunk = 0, False
        while at < len(best.data) and tries < budget and time.monotonic() < end:
            if same(best.data[:at] + best.data[at + size :]):
                shrunk = True
            else:
                at += size
        if size == 1 and not shrunk:
            break
        size = max(1, size // 2)
    for at in range(len(best.data)):
        if tries >= budget or time.monotonic() > end:
            break
        if best.data[at] and at < len(best.data):
            same(best.data[:at] + b"\0" + best.data[at + 1 :])
    return best


class _Run:
    """The state of one run: counts, distinct findings, and where crash files go."""

    def __init__(
        self, subject: Subject, crashes: Path, recipe: str, out: Callable[[str], object], max_findings: int
    ) -> None:
        self.subject = subject
        self.crashes = crashes
        self.recipe = recipe
        self.out = out
        self.max_findings = max_findings
        self.executions = self.accepted = self.rejected = 0
        self.findings: dict[tuple[str, str], Finding] = {}

    @property
    def done(self) -> bool:
        return len(self.findings) >= self.max_findings

    def case(self, data: bytes) -> None:
        self.executions += 1
        got = self.subject.judge(data)
        if not isinstance(got, Finding):
            self.accepted += got == "accept"
            self.rejected += got == "reject"
        elif (got.kind, got.where) not in self.findings:
            small = minimise(self.subject, got)
            self.findings[(got.kind, got.where)] = self._write(small)

    def _write(self, finding: Finding) -> Finding:
        self.crashes.mkdir(parents=True, exist_ok=True)
        path = self.crashes / f"{finding.kind}-{digest(finding.data)}.bin"
        path.write_bytes(finding.data)
        replay = f"{self.recipe} --replay {shlex.quote(str(path))}"
        path.with_suffix(".txt").write_text(
            f"{finding.kind}: {finding.message}\nhex: {finding.data.hex()}\nreplay: {replay}\n", "utf-8"
        )
        self.out(f"{finding.kind}: {finding.message}; {len(finding.data)} bytes in {path}")
        return finding._replace(path=str(path), replay=replay)


def make_subject(
    target: str | None = None,
    *,
    custom: str | Callable[[bytes], object] | None = None,
    rejects: str | type[BaseException] | None = None,
    command: str | None = None,
    oracle: bool = False,
    wire: str = "v1",
    hang_s: float = 10.0,
    memory_bytes: int = 256 * MIB,
) -> tuple[Subject, Target, str]:
    """(subject, target whose inputs it gets, the command line that makes it again) from the options of `headrace fuzz`."""
    schema = load_schema(wire)
    judge = schema if oracle else None
    recipe = (
        "headrace fuzz" + (f" {target}" if target else "") + (f" --wire {shlex.quote(wire)}" if wire != "v1" else "")
    )
    if custom is None and command is None:
        found = target_named(target or f"frame-{wire}")
        subject = Subject(found.name, found.run, hang_s=hang_s, memory_bytes=memory_bytes)
        return subject, found, f"headrace fuzz {found.name}"
    name = target or "frame"
    inputs = _TARGETS.get(name) or Target(
        name, _nothing, frame_inputs(schema), lambda: frame_seeds(schema), "a decoder of frames"
    )
    if command is not None:
        recipe += f" --target-cmd {shlex.quote(command)}" + (" --oracle" if oracle else "")
        return (
            CommandSubject(command, oracle=judge, hang_s=hang_s, memory_bytes=max(memory_bytes, 1024 * MIB)),
            inputs,
            recipe,
        )
    assert custom is not None  # one of the two is given
    run = load_object(custom) if isinstance(custom, str) else custom
    refusal = load_object(rejects) if isinstance(rejects, str) else rejects
    if not callable(run) or not (refusal is None or (isinstance(refusal, type) and issubclass(refusal, BaseException))):
        raise ValidationError("a target is a callable, and what it rejects with is an exception class", field="target")
    recipe += f" --target {_spec(custom)}"
    if rejects is not None:
        recipe += f" --rejects {_spec(rejects)}"
    refusals = (refusal,) if refusal is not None else ()
    subject = Subject(str(name), run, rejects=refusals, oracle=judge, hang_s=hang_s, memory_bytes=memory_bytes)
    return subject, inputs, recipe + (" --oracle" if oracle else "")


def _spec(what: object) -> str:
    """``module:name`` of a callable or class, as the command line wants it."""
    if isinstance(what, str):
        return shlex.quote(what)
    return f"{getattr(what, '__module__', None)}:{getattr(what, '__qualname__', type(what).__qualname__)}"


def _nothing(data: bytes) -> None:
    return None


def engines() -> list[str]:
    """The engines that can run here, best first."""
    return (["atheris"] if importlib.util.find_spec("atheris") else []) + ["hypothesis"]


def run_fuzz(
    target: str | None = None,
    *,
    seconds: float | None = None,
    cases: int | None = None,
    seed: int = 0,
    engine: str | None = None,
    corpus: Path | None = None,
    crashes: Path | None = None,
    max_findings: int = 5,
    out: Callable[[str], object] = lambda line: None,
    **options: Any,
) -> FuzzReport:
    """Fuzz `target` (a name of `TARGETS`), or what `options` name (see `make_subject`), for `seconds` and at most `cases`.

    `corpus`: a folder of further inputs (default `specs/corpus/TARGET`); `crashes`: where findings go (default
    ``crashes/TARGET``). With neither bound given: 60 seconds. Raises ValidationError for options that mean nothing.
    """
    from . import fuzz_engines

    subject, inputs, recipe = make_subject(target, **options)
    chosen = engine or engines()[0]
    if chosen not in engines():
        raise ValidationError(f"engine {show(chosen)} is not here: there are {', '.join(engines())}", field="engine")
    if seconds is None and cases is None:
        seconds = 60.0
    run = _Run(subject, crashes or Path("crashes") / inputs.name, recipe, out, max_findings)
    started = time.monotonic()
    seeds = list(dict.fromkeys([*inputs.seeds().values(), *read_corpus(corpus or corpus_folder(inputs.name))]))
    if chosen == "atheris":
        complete = fuzz_engines.atheris(run, options | {"target": target}, seeds, seconds, cases, seed)
    else:
        complete = fuzz_engines.hypothesis(run, inputs.inputs, seeds, seconds, cases, seed)
    took = time.monotonic() - started
    return FuzzReport(
        inputs.name, chosen, run.executions, run.accepted, run.rejected, took, list(run.findings.values()), complete
    )


def replay(path: Path, target: str | None = None, **options: Any) -> str | Finding:
    """The verdict on one crash file: "accept", "reject" or a Finding."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValidationError(f"{show(str(path))} cannot be read: {error.strerror}") from None
    return make_subject(target, **options)[0].judge(data)


def corpus_folder(name: str) -> Path:
    """The shipped corpus of a target."""
    from .. import specs

    return specs.path("corpus", name)


def read_corpus(folder: Path) -> list[bytes]:
    """The inputs in `folder`, in order of their names; none when there is no such folder."""
    return [path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()] if folder.is_dir() else []


def command(
    target: str | None = None,
    *,
    replay_file: Path | None = None,
    export: Path | None = None,
    seconds: float | None = None,
    cases: int | None = None,
    seed: int = 0,
    engine: str | None = None,
    crashes: Path | None = None,
    out: Callable[[str], object] = print,
    **options: Any,
) -> int:
    """`headrace fuzz`: run, replay or export; lines go to `out`. 0: no finding; 1: findings. ValidationError: a mistake (2)."""
    if export is not None:
        from .fuzz_export import export_kit

        schema = load_schema(options.get("wire", "v1"))
        seeds = Target("frame", _nothing, frame_inputs(schema), lambda: frame_seeds(schema), "")
        out(f"{export_kit(export, schema, seeds)} files in {export}")
        return 0
    if replay_file is not None:
        got = replay(replay_file, target, **options)
        out(got if isinstance(got, str) else f"{got.kind}: {got.message}")
        return int(isinstance(got, Finding))
    report = run_fuzz(
        target, seconds=seconds, cases=cases, seed=seed, engine=engine, crashes=crashes, out=out, **options
    )
    for line in report.lines():
        out(line)
    return int(bool(report.findings) or not report.executions)
