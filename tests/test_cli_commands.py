"""The command line as a person or a script meets it: a process of its own, its output and its exit status."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from headrace import __version__, specs
from headrace.__main__ import main
from headrace.codec.chunk import ChunkEvent
from headrace.codec.encode import encode_batch, frame_egress_error, frame_egress_result
from headrace.codec.schema import load_schema
from headrace.fsm import MACHINES, export
from headrace.runtime import commands
from headrace.runtime.commands import stale

ENVIRONMENT = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}


def headrace(*args, stdin: bytes | int | None = subprocess.DEVNULL, **env):
    given = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "headrace", *args],
        capture_output=True,
        timeout=100,
        env={**ENVIRONMENT, **env},
        **given,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_demo_reads_a_file_and_gives_plain_lines_where_stdout_is_no_terminal(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("It is\nMr. Darcy\n")
    status, out, err = headrace("demo", str(file), "--scheduler", "echo")
    assert (status, err) == (0, "")
    assert "[1] It is |It is (stop, " in out
    assert "2: 2 completed, 0 failed, 0 refused" in out
    assert "\x1b" not in out


def test_the_demo_reads_standard_input_and_takes_every_option():
    options = (
        "--plain --scheduler markov --prompts 4 --max-new-tokens 8 --temperature 0.5 --top-k 5 --top-p 0.9 --seed 3 --stop . --stop , "
        "--max-batch 2 --in-flight 3 --ring 16 --shards 2 --wire v2 --context-len 256 --step-ms 0.1"
    )
    status, out, err = headrace("demo", "-", *options.split(), stdin="Elizabeth\nnaïve 日本\n".encode())
    assert (status, err) == (0, "")
    assert "[3] Elizabeth |" in out
    assert "4: 4 completed" in out


def test_the_demo_takes_any_tokenizer_and_any_text(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["one two three"], trainer=trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("one two three\none two three\n")
    options = [
        "--tokenizer",
        str(tmp_path),
        "--text",
        str(tmp_path / "text.txt"),
        "--max-new-tokens",
        "20",
        "--temperature",
        "0",
    ]
    status, out, err = headrace("demo", "-", *options, stdin=b"one two")
    assert (status, err) == (0, "")
    assert "[1] one two | three" in out


@pytest.fixture
def here(capsys, monkeypatch):
    """The same in this process, which is much faster: (status, stdout, stderr); standard input is empty."""

    def run(*args):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        status = main(args)
        return status, *capsys.readouterr()

    return run


def test_a_mistake_is_exit_status_2_of_the_process():
    status, out, err = headrace("demo", "/no/such/file")
    assert (status, out) == (2, "")
    assert err == "headrace: '/no/such/file' cannot be read: No such file or directory\n"


MISTAKES = [
    (["demo", "/no/such/file"], "'/no/such/file' cannot be read"),
    (["demo", "-"], "standard input holds no prompt"),
    (["demo", "--tokenizer", __file__], "not a tokenizer file"),
    (["demo", "--tokenizer", "no-org/no-model"], "nothing is downloaded"),
    (["demo", "--scheduler", "magic"], "--scheduler"),
    (["demo", "--temperature", "hot"], "--temperature"),
    (["demo", "--temperature", "hot"], "'hot'"),
    (["bench", "--rounds", "-5"], "-5"),
    (["demo", "--temperature", "-1"], "temperature"),
    (["demo", "--max-batch", "0"], "--max-batch"),
    (["demo", "--prompts", "0"], "--prompts"),
    (["demo", "--stop"], "--stop"),
    (["demo", "--wire", "v9"], "v9"),
    (["demo", "--wire", __file__], "wire schema"),
    (["demo", "--nonsense"], "--nonsense"),
    (["demo", "a", "b"], "b"),
    (["nonsense"], "nonsense"),
    (["--nonsense"], "--nonsense"),
    (["inspect"], "Missing argument"),
    (["inspect", "/no/such/file"], "cannot be read"),
    (["inspect", __file__, "--hex"], "hexadecimal"),
    (["inspect", "-", "--wire", "v9"], "v9"),
    (["demo", "--trace", "/no/such/folder/file"], "--trace"),
    (["trace", "/no/such/file"], "cannot be read"),
    (["trace", __file__], "line 1: not JSON"),
    (["trace", "."], "cannot be read"),
    (["bench", "--rust-so", __file__], "--tokenizer-dir"),
    (["bench", "--rust-so", "/no/such/file", "--tokenizer-dir", "."], "/no/such/file"),
    (["bench", "--json", "/no/such/folder/file"], "cannot be written"),
    (["bench", "--only", "nonsense"], "nonsense"),
    (["spec", "nonsense"], "nonsense"),
    (["spec", "export", "machine/nobody"], "machine/request"),
    (["spec", "export", "machine/request", "--format", "pdf"], "mermaid"),
    (["spec", "export", "wire/v1", "--format", "dot"], "toml"),
    (["demo", "\udcff\x1b[2J"], "cannot be read"),
]


@pytest.mark.parametrize(("args", "words"), MISTAKES)
def test_a_mistake_is_one_clear_line_on_stderr_and_status_2(args, words, here):
    status, out, err = here(*args)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("headrace: ")
    assert words in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "args", [[], ["spec"], ["--help"], ["demo", "--help"], ["inspect", "-h"], ["spec", "export", "--help"]]
)
def test_help_is_on_stdout_with_status_0(args, here):
    status, out, err = here(*args)
    assert (status, err) == (0, "")
    assert "Usage: headrace" in out


def test_the_version():
    assert headrace("--version") == (0, f"headrace {__version__}\n", "")


def test_the_version_loads_neither_numpy_nor_tokenizers():
    code = "import sys; from headrace.__main__ import main; main(['--version']); print(sorted({'numpy', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_a_normal_end():
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "demo", "--plain", "--prompts", "3000", "--max-new-tokens", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout.readline().startswith(b"[1] ")
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(100) == 0


def test_an_interrupt_ends_the_demo_cleanly_with_a_summary_and_status_130():
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headrace",
            "demo",
            "--plain",
            "--step-ms",
            "50",
            "--max-new-tokens",
            "2000",
            "--max-batch",
            "2",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    with process.stdout, process.stderr:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.stdout.read().decode(), process.stderr.read().decode()
    assert process.wait(100) == 130
    assert first.startswith(b"[1] ")
    assert err == "headrace: interrupted\n"
    assert "not finished" in rest
    assert "0 against the tables" in rest


def test_streams_that_are_closed_or_know_no_unicode_are_no_reason_to_fail(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("naïve 日本\n", encoding="utf-8")
    status, out, err = headrace(
        "demo", str(file), "--scheduler", "echo", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C"
    )
    assert (status, err) == (0, "")
    assert "[1] na\\xefve \\u65e5\\u672c |na\\xefve" in out
    command = f'"{sys.executable}" -m headrace demo "{file}" --scheduler echo'
    assert subprocess.run(f"{command} >&-", shell=True, timeout=100, stderr=subprocess.PIPE).stderr == b""
    closed = subprocess.run(f"{command.replace(str(file), '-')} <&-", shell=True, timeout=100, capture_output=True)
    assert (closed.returncode, closed.stderr) == (2, b"headrace: standard input is closed\n")


# ---- inspect


def frame(schema, **more) -> bytes:
    chunks = [
        ChunkEvent(rid="first", token_ids=[11, 12, 13], prompt_tokens=7),
        ChunkEvent(rid="second", token_ids=[21], prompt_tokens=2, finish_reason={"type": "stop", "matched": 21}),
    ]
    return encode_batch(chunks, schema)


@pytest.mark.parametrize("wire", ["v1", "v2"])
def test_inspect_tells_a_batch_in_words(tmp_path, wire):
    file = tmp_path / "frame"
    file.write_bytes(frame(load_schema(wire)))
    status, out, err = headrace("inspect", str(file), "--wire", wire)
    assert (status, err) == (0, "")
    for words in (
        "2 (BATCH)",
        f"schema {wire}",
        "'first', 3 ids [11, 12, 13], running, prompt_tokens 7",
        "'matched': 21",
        "valid",
    ):
        assert words in out
    report = json.loads(headrace("inspect", str(file), "--wire", wire, "--json")[1])
    assert report["ok"] is True
    assert len(report["requests"]) == 2


def test_inspect_reads_hexadecimal_and_standard_input():
    data = frame_egress_result("c1", b"payload").hex().encode()
    status, out, _ = headrace("inspect", "-", "--hex", stdin=data)
    assert status == 0
    assert "1 (RESULT)" in out
    assert "b'payload'" in out
    status, out, _ = headrace("inspect", "-", stdin=frame_egress_error("c2", "no\x1b[2J"))
    assert status == 0
    assert "3 (ERROR)" in out
    assert "'no\\x1b[2J'" in out


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "empty"),
        (b"\x09", "unknown_tag"),
        (b"\x02\x01", "header_length"),
        (b"\x01\xc1", "result"),
        (frame(load_schema("v1"))[:-1], "data_length"),
        (frame(load_schema("v1")) + b"\0", "data_length"),
    ],
    ids=["nothing", "tag", "header", "result", "short", "long"],
)
def test_inspect_names_the_broken_rule_with_status_1(data, rule):
    status, out, err = headrace("inspect", "-", stdin=data)
    assert (status, err) == (1, "")
    assert f": {rule}: " in out
    if rule == "data_length":
        assert "it names 'first', 'second' (all of them)" in out


# ---- trace


def test_a_demos_trace_is_written_and_validates_and_one_forged_step_is_found(tmp_path, here):
    file = tmp_path / "trace.jsonl"
    assert here("demo", "--plain", "--prompts", "3", "--max-new-tokens", "3", "--trace", str(file))[0] == 0
    status, out, err = here("trace", str(file))
    assert (status, err) == (0, "")
    assert out.endswith(" records, 0 violations\n")
    drawn = tmp_path / "perfetto.json"
    assert here("trace", str(file), "--perfetto", str(drawn))[0] == 0
    assert json.loads(drawn.read_text())["traceEvents"]
    status, out, err = here("trace", str(file), "--perfetto", "/no/such/folder/file")
    assert (status, out, err.count("\n")) == (2, "", 1)
    lines = file.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"event": "NEEDS_TOKENIZE"' in line)
    forged = json.loads(lines[at]) | {"to": "QUEUED", "stage": "\x1b[2J"}
    file.write_text("\n".join([*lines[:at], json.dumps(forged), *lines[at + 1 : -1]]))
    status, out, err = here("trace", str(file))
    assert (status, err) == (1, "")
    assert "\x1b" not in out
    assert "the file was cut" in out
    file.write_text('{"trace": "headrace", "version": 1, "machines": [1]}')
    assert here("trace", str(file))[0] == 2


# ---- bench


def test_the_benchmark_names_the_machine_its_peers_the_targets_and_the_floors(tmp_path, here):
    numbers, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    options = [
        "--scale",
        "0.01",
        "--rounds",
        "1",
        "--only",
        "step sink",
        "--json",
        str(numbers),
        "--plot",
        str(picture),
    ]
    status, out, _ = here("bench", *options)
    assert status == 0
    for words in ("without HTTP", "machine: ", "DecodeStream.step", "not measured", "memory copy of the frame"):
        assert words in out
    [row] = json.loads(numbers.read_text())["rows"]
    assert row["ours"] > 0
    assert "step sink, 256 requests / DecodeStream.step" in picture.read_text()


# ---- spec


def test_spec_lists_and_exports_every_machine_and_wire(here):
    status, out, _ = here("spec", "list")
    assert status == 0
    names = out.split()
    assert set(names) == {f"machine/{name}" for name in MACHINES} | {"wire/v1", "wire/v2"}
    assert here("spec", "export", "machine/sink")[1] == export(MACHINES["sink"], "json")
    assert here("spec", "export", "machine/sink", "--format", "mermaid")[1] == export(MACHINES["sink"], "mermaid")
    assert "| 3 | tok_lens | u32 |" in here("spec", "export", "wire/v1")[1]
    assert 'name = "v1"' in here("spec", "export", "wire/v1", "--format", "toml")[1]
    assert '"name": "v2"' in here("spec", "export", "wire/v2", "--format", "json")[1]


def test_spec_check_passes_here_and_finds_every_kind_of_staleness(tmp_path, here, monkeypatch):

    assert here("spec", "check") == (0, "the exports are up to date\n", "")
    for folder in ("machines", "vectors"):
        shutil.copytree(specs.path(folder), tmp_path / folder)
    assert stale(tmp_path) == []
    (tmp_path / "machines" / "sink.json").unlink()
    (tmp_path / "machines" / "ring.json").write_text("{}")
    (tmp_path / "machines" / "extra.json").write_text("{}")
    (tmp_path / "vectors" / "egress-v1.json").write_text("[]")
    (tmp_path / "vectors" / "ingress-v1.json").write_text("[]")
    (tmp_path / "vectors" / "ingress-bad.json").unlink()
    assert sorted(problem.split(" ")[0] for problem in stale(tmp_path)) == [
        "machines/extra.json",
        "machines/ring.json",
        "machines/sink.json",
        "vectors/egress-v1.json",
        "vectors/ingress-bad.json",
        "vectors/ingress-v1.json",
    ]
    monkeypatch.setattr(commands, "stale", lambda: ["machines/sink.json is missing"])
    assert here("spec", "check") == (1, "machines/sink.json is missing\n1 problem(s)\n", "")
