"""The command line: ``headrace …`` or ``python -m headrace …``.

Owns: the commands, their options, and how a mistake looks. No logic of its own. Rules it keeps:

* A mistake on the command line or in a file is one clear line on standard error and exit status 2, never a traceback. Other
  ends: 0 fine, 1 the thing that was asked about is broken or incomplete, 130 interrupted.
* A reader that goes away (``headrace … | head``) is a normal end.
* A command's module is imported when the command runs: ``headrace --version`` loads neither numpy nor tokenizers.
* Parsing and running are apart: a command function only returns what is to be run. The parser turns interrupts and broken pipes
  inside it into exit statuses of its own choice, so nothing that works may run there.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ._version import __version__

# Old versions of typer use the click package, new ones their own copy of it; this is the base of all its errors in both.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]  # BadParameter < UsageError < ClickException

Job = Callable[[], int]

app = typer.Typer(
    name="headrace",
    help="The tokenizer manager of an LLM server: text in, a scheduler in the middle, text out.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
spec_app = typer.Typer(help="The machines and the wire, as data.", invoke_without_command=True, rich_markup_mode=None)
app.add_typer(spec_app, name="spec")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Text in, a scheduler in the middle, text out."""
    _help_if_alone(context)


@spec_app.callback()
def _spec(context: typer.Context) -> None:
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command(short_help="Many prompts through a whole manager, live.")
def demo(
    file: Annotated[
        str | None, typer.Argument(help="Prompts, one per line; - is standard input. Default: a built-in set.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, its directory, or a model in the hub cache.")
    ] = None,
    scheduler: Annotated[str, typer.Option(help="markov continues the prompts, echo gives them back.")] = "markov",
    text: Annotated[str | None, typer.Option(help="The text that markov learns from. Default: a novel.")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="How many requests; the prompts are repeated or cut to it.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens per answer at most.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; -1 is all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens up to this share.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Request number i draws from seed + i.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer before this string; may be repeated.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that the scheduler runs at once.")] = 64,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests submitted at once. Default: all the ring holds.")
    ] = None,
    ring: Annotated[int | None, typer.Option(min=1, help="Capacity of the ingress ring.")] = None,
    shards: Annotated[int, typer.Option(min=1, max=64, help="Detokenizer shards.")] = 1,
    wire: Annotated[str, typer.Option(help="Wire revision: v1, v2, or a schema file.")] = "v1",
    context_len: Annotated[int, typer.Option(min=2, help="Context length in tokens.")] = 8192,
    step_ms: Annotated[
        float | None, typer.Option(min=0, help="Time of a scheduler step. Default: 20 in the live view, else 0.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="Write the recorded steps of all state machines to this file.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="No live view; the default where stdout is no terminal.")
    ] = False,
) -> Job:
    """The main job on real input: many prompts at once, tokens streaming, a live view, a summary."""
    from .runtime.demo import DemoOptions, run

    options = DemoOptions(
        file=file,
        tokenizer=tokenizer,
        scheduler=scheduler,
        text=text,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        max_batch=max_batch,
        in_flight=in_flight,
        ring=ring,
        shards=shards,
        wire=wire,
        context_len=context_len,
        step_ms=step_ms,
        trace=trace,
        plain=plain,
    )
    return lambda: run(options)


@app.command(short_help="A frame, in words.")
def inspect(
    file: Annotated[str, typer.Argument(help="A file that holds one frame or ingress header; - is standard input.")],
    wire: Annotated[str, typer.Option(help="Wire revision: v1, v2, or a schema file.")] = "v1",
    hex_: Annotated[bool, typer.Option("--hex", help="The file holds hexadecimal digits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report, as JSON.")] = False,
) -> Job:
    """A frame, in words: tag, header by field, columns, offsets, the broken rule if it is broken (exit status 1)."""
    from .runtime.commands import inspect_file

    return lambda: inspect_file(file, wire, hex_, as_json, sys.stdout)


@app.command(short_help="Validate a recorded trace.")
def trace(
    file: Annotated[str, typer.Argument(help="A trace, as `headrace demo --trace FILE` writes it.")],
    perfetto: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write a file for the Perfetto UI or chrome://tracing.")
    ] = None,
) -> Job:
    """Every recorded step against the tables and the rules between the machines (exit status 1 if one is broken)."""
    from .runtime.commands import trace_file

    return lambda: trace_file(file, perfetto, sys.stdout)


@app.command(short_help="The conformance kit against an implementation.")
def conform(
    target: Annotated[str | None, typer.Argument(metavar="MODULE:FACTORY", help="A Python target.")] = None,
    exec_: Annotated[str | None, typer.Option("--exec", help="A program that speaks JSON lines, instead.")] = None,
    suite: Annotated[str | None, typer.Option(help="Only these suites, with commas between.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    wire: Annotated[str | None, typer.Option(help="Only this wire revision.")] = None,
    cases: Annotated[list[str] | None, typer.Option(help="A case file to use instead; may be repeated.")] = None,
    known_failures: Annotated[str | None, typer.Option(help="A list of cases known to fail, with reasons.")] = None,
    junit: Annotated[str | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    html: Annotated[str | None, typer.Option(help="Write an HTML report to this file.")] = None,
    save_frames: Annotated[str | None, typer.Option(help="Keep the frames that were pushed in this folder.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.05, help="Seconds that a step may take.")] = 5.0,
    list_: Annotated[bool, typer.Option("--list", help="List the cases and run nothing.")] = False,
) -> Job:
    """Run the conformance kit; 0 only if every applicable MUST holds (see docs/conformance.md)."""
    from .specs.conformance.command import Options
    from .specs.conformance.command import conform as run

    options = Options(
        target=target,
        exec_=exec_,
        suite=suite,
        case=tuple(case or ()),
        wire=wire,
        files=tuple(cases or ()),
        known=known_failures,
        junit=junit,
        html=html,
        save_frames=save_frames,
        limit_s=time_limit,
        list_=list_,
    )
    return lambda: run(options, sys.stdout)


@app.command(short_help="One deterministic run with faults.")
def simulate(
    seed: Annotated[int, typer.Option(help="The run draws everything from it.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Actions before the fair end.")] = 1500,
    runs: Annotated[int, typer.Option(min=1, help="Runs, from this seed on.")] = 1,
) -> Job:
    """One deterministic run of the pipeline with faults; a failure prints the line that replays it (exit status 1)."""
    from .runtime.simulate import run_command

    return lambda: run_command(seed, steps, runs, sys.stdout)


@app.command(short_help="Model checking: tables and every interleaving of small worlds.")
def check(
    only: Annotated[str, typer.Option(help="Only configurations whose name holds this.")] = "",
    deep: Annotated[bool, typer.Option("--deep", help="The larger configurations, too.")] = False,
    formal: Annotated[bool, typer.Option("--formal", help="The formal models, too, where SPIN is installed.")] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="With --formal: the mutants as well, each of which must fail.")
    ] = False,
    bound: Annotated[
        list[str] | None, typer.Option(help="With --formal: another bound of the models, NAME=NUMBER; may be repeated.")
    ] = None,
) -> Job:
    """Tables, and every interleaving of small worlds of the shipped stages; states explored, properties held (else status 1)."""
    from .runtime.checks import bounds_of, run_command

    if (mutants or bound) and not formal:
        raise typer.BadParameter("--mutants and --bound go with --formal")
    try:
        bounds = bounds_of(bound or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return lambda: run_command(sys.stdout, deep=deep, only=only, formal=formal, mutants=mutants, bounds=bounds)


@app.command(short_help="Fuzz a decoder: headrace's own, or yours.")
def fuzz(
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="frame-v1, ingress-v2, sampling, body, …")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="How long (60 where no bound is given).")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="How many cases at most.")] = None,
    seed: Annotated[int, typer.Option(help="The run draws everything from it.")] = 0,
    engine: Annotated[
        str | None, typer.Option(help="atheris or hypothesis (the better one that is installed).")
    ] = None,
    wire: Annotated[str, typer.Option(help="Wire revision of the frames for --target and --target-cmd.")] = "v1",
    custom: Annotated[str | None, typer.Option("--target", metavar="MODULE:CALLABLE", help="Your decoder.")] = None,
    rejects: Annotated[str | None, typer.Option(metavar="MODULE:CLASS", help="What it raises to reject.")] = None,
    command: Annotated[
        str | None, typer.Option("--target-cmd", help="A program: frame on stdin; exit 0 accepts, 1 rejects.")
    ] = None,
    oracle: Annotated[bool, typer.Option("--oracle", help="A verdict other than headrace's is a finding.")] = False,
    replay: Annotated[str | None, typer.Option(metavar="FILE", help="Judge one crash file.")] = None,
    export: Annotated[str | None, typer.Option(metavar="DIR", help="Corpus, lies and dictionary as files.")] = None,
    crashes: Annotated[str | None, typer.Option(metavar="DIR", help="Where findings go (crashes/TARGET).")] = None,
) -> Job:
    """Fuzz TARGET (or your own decoder) and write what is found, made small, with the line that replays it (exit status 1)."""
    from pathlib import Path

    def job() -> int:
        try:
            from .codec.fuzz import command as run
        except ImportError as error:  # Hypothesis is an extra
            return _fail(str(error))
        if custom is not None:
            sys.path.insert(0, os.getcwd())  # as `python -m` has it, so that the module beside you is found
        return run(
            target,
            replay_file=Path(replay) if replay is not None else None,
            export=Path(export) if export is not None else None,
            crashes=Path(crashes) if crashes is not None else None,
            seconds=seconds,
            cases=cases,
            seed=seed,
            engine=engine,
            out=lambda line: _print(f"{line}\n"),
            wire=wire,
            custom=custom,
            rejects=rejects,
            command=command,
            oracle=oracle,
        )

    return job


@app.command(short_help="The benchmark, as a table and a plot.")
def bench(
    rust_so: Annotated[
        str | None, typer.Option(metavar="FILE", help="SGLang's compiled server extension, as a peer.")
    ] = None,
    tokenizer_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder with a tokenizer.json. Default: the demo's.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the least of each number counts.")] = 5,
    scale: Annotated[float, typer.Option(min=0.01, max=10, help="Tokens per request, relative to the full run.")] = 1.0,
    only: Annotated[str, typer.Option(help="Only rows whose name holds this.")] = "",
    json_: Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write the numbers to this file.")] = None,
    plot: Annotated[str | None, typer.Option(metavar="OUT.svg", help="Draw the ratios into this file.")] = None,
) -> Job:
    """Frame to text, without HTTP: ratios to peers measured in the same run, targets, and the floors beside them."""
    from .runtime.bench.report import run_command

    return lambda: run_command(
        sys.stdout,
        rust_so=rust_so,
        tokenizer_dir=tokenizer_dir,
        rounds=rounds,
        scale=scale,
        only=only,
        json_to=json_,
        plot_to=plot,
    )


@spec_app.command("list")
def spec_list() -> Job:
    """The names that `spec export` knows."""
    from .runtime.commands import names

    return lambda: _print("".join(f"{name}\n" for name in names()))


@spec_app.command("export")
def spec_export(
    name: Annotated[str, typer.Argument(help="machine/NAME or wire/NAME, as in `spec list`.")],
    format_: Annotated[
        str | None,
        typer.Option("--format", help="Machines: json, mermaid, dot, scxml, promela. Wire: table, toml, json."),
    ] = None,
) -> Job:
    """A machine or a wire revision, on standard output."""
    from .runtime.commands import export_text

    return lambda: _print(export_text(name, format_))


@spec_app.command("check", short_help="Everything generated is up to date.")
def spec_check() -> Job:
    """Everything generated from the declarations is up to date (else exit status 1)."""
    from .runtime.commands import stale

    def job() -> int:
        problems = stale()
        last = f"{len(problems)} problem(s)" if problems else "the exports are up to date"
        _print("".join(f"{line}\n" for line in [*problems, last]))
        return 1 if problems else 0

    return job


def _print(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _fail(message: str) -> int:
    line = " ".join(message.split())
    # Whatever the message holds, it must reach a terminal of any encoding as one line.
    print(f"headrace: {line}".encode("ascii", "backslashreplace").decode(), file=sys.stderr)
    return 2


def _input(error: Exception) -> str:
    """The value that a parser's message is about, where it does not say so itself (new versions of typer)."""
    found: Callable[[], list[dict[str, Any]]] | None = getattr(error.__cause__, "errors", None)
    if found is None:
        return ""
    from .codec.errors import show

    return "; got " + ", ".join(show(one.get("input")) for one in found())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: this process's) and returns its exit status."""
    if sys.stdout is None:  # closed by whoever started us; what would be printed is not wanted
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # prompts and answers may hold what this terminal cannot show
    command: Callable[..., Any] = typer.main.get_command(app).main
    try:
        job = command(args=None if argv is None else list(argv), prog_name="headrace", standalone_mode=False)
        status = job() if callable(job) else job
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except _CommandLineError as error:
        describe: Callable[[], str] | None = getattr(error, "format_message", None)
        return _fail((str(error) if describe is None else describe()) + _input(error))
    except (KeyboardInterrupt, typer.Abort):
        print("headrace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # What is still buffered can never be written; without this the interpreter would complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from .codec.errors import HeadraceError

        if not isinstance(error, (HeadraceError, OSError)):
            raise
        return _fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
