"""The demo in process: what comes out for what goes in, what the summary says, and which mistakes are found before a start."""

import io
import re
import sys
import threading
from types import SimpleNamespace

import pytest
from headrace.codec.errors import HeadraceError
from headrace.runtime.demo import Board, Client, DemoOptions, choose_prompts, eos_id, read_prompts, run
from headrace.runtime.demo_view import LiveView, answer_line, printable, quantile, summary_lines


def answers(out: str) -> dict[int, str]:
    return {int(m[1]): m[2] for m in re.finditer(r"^\[(\d+)\] (.*)$", out, re.M)}


def fact(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(name))[len(name) :].strip()


def test_echo_gives_every_prompt_back_whole_in_its_own_line(tmp_path, capsys):
    prompts = [f"prompt {n}: naïve 日本 😀 {'word ' * n}".strip() for n in range(60)]
    file = tmp_path / "p.txt"
    file.write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    assert run(DemoOptions(file=str(file), scheduler="echo", plain=True, max_new_tokens=500, max_batch=7)) == 0
    out = capsys.readouterr().out
    lines = answers(out)
    assert list(lines) == list(range(1, 61))
    for n, prompt in enumerate(prompts):
        assert lines[n + 1].startswith(f"{prompt} |{prompt} (stop, ")
    assert fact(out, "requests") == "60: 60 completed, 0 failed, 0 refused"
    assert re.fullmatch(r"([\d,]+) in, \1 out", fact(out, "tokens"))
    assert fact(out, "decoder") == "byte-level"


def test_200_prompts_go_through_every_state_and_against_no_table(capsys):
    assert run(DemoOptions(prompts=200, plain=True, max_new_tokens=24)) == 0
    out = capsys.readouterr().out
    assert len(answers(out)) == 200
    states = fact(out, "states reached")
    for state in (
        "RECEIVED",
        "VALIDATING",
        "NORMALIZING",
        "TOKENIZING",
        "PRE_SEND_VALIDATING",
        "QUEUED",
        "STREAMING",
        "FINALIZING",
        "COMPLETED",
    ):
        assert f"{state} 200" in states
    assert fact(out, "state machines").endswith(" steps, 0 against the tables")
    assert re.fullmatch(r"p50 [\d.]+ ms, p99 [\d.]+ ms", fact(out, "first token"))


def test_the_same_seed_gives_the_same_answers_whatever_the_batch(capsys):
    texts = []
    for seed, batch in ((3, 64), (3, 1), (4, 64)):
        run(DemoOptions(prompts=6, plain=True, seed=seed, max_batch=batch, max_new_tokens=32))
        texts.append(answers(capsys.readouterr().out))
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_answer_before_it(capsys):
    run(DemoOptions(prompts=12, plain=True, stop=(",",), max_new_tokens=64))
    lines = answers(capsys.readouterr().out).values()
    stopped = [line for line in lines if "(stop at ','" in line]
    assert stopped
    for line in stopped:
        assert "," not in line.split("|", 1)[1].rsplit("(", 1)[0]


def test_max_new_tokens_0_gives_empty_answers_that_end_by_length(capsys):
    assert run(DemoOptions(prompts=3, plain=True, max_new_tokens=0)) == 0
    out = capsys.readouterr().out
    assert all(line.endswith("| (length, 0 tokens)") for line in answers(out).values())


def test_requests_that_the_full_ring_refuses_are_shown_and_counted(capsys):
    assert run(DemoOptions(prompts=50, plain=True, ring=1, in_flight=50, step_ms=50.0, max_new_tokens=4)) == 1
    out = capsys.readouterr().out
    lines = answers(out)
    assert len(lines) == 50, "none is lost"
    refused = sum("refused: 503 queue_full" in line for line in lines.values())
    completed = sum("(length" in line or "(stop" in line for line in lines.values())
    assert refused > 0
    assert refused + completed == 50
    assert fact(out, "requests") == f"50: {completed} completed, 0 failed, {refused} refused"
    assert fact(out, "error").startswith(f"{refused} x 503")


def test_by_default_no_more_is_submitted_than_a_small_ring_holds(capsys):
    assert run(DemoOptions(prompts=20, plain=True, ring=2, max_new_tokens=4)) == 0
    assert fact(capsys.readouterr().out, "requests") == "20: 20 completed, 0 failed, 0 refused"


def test_a_prompt_that_does_not_fit_fails_alone(tmp_path, capsys):
    file = tmp_path / "p.txt"
    file.write_text("short\n" + "long " * 100 + "\nshort again\n")
    assert run(DemoOptions(file=str(file), plain=True, scheduler="echo", context_len=64, max_new_tokens=16)) == 1
    lines = answers(capsys.readouterr().out)
    assert "failed: 400" in lines[2]
    assert "short again" in lines[3].split("|")[1]


@pytest.mark.parametrize("wire", ["v1", "v2"])
def test_both_wires_and_several_shards_give_the_same(wire, capsys):
    assert run(DemoOptions(prompts=5, plain=True, scheduler="echo", wire=wire, shards=3)) == 0


def test_no_thread_is_left(capsys):
    before = set(threading.enumerate())
    run(DemoOptions(prompts=2, plain=True, max_new_tokens=2))
    assert {
        thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("headrace")
    } == set()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"file": "/no/such/file"}, "cannot be read"),
        ({"file": "."}, "cannot be read"),
        ({"file": "a\0b"}, "not"),
        ({"scheduler": "magic"}, "--scheduler must be one of echo, markov"),
        ({"tokenizer": "/no/such/file"}, "no such file"),
        ({"tokenizer": __file__}, "not a tokenizer file"),
        ({"text": "/no/such/file"}, "cannot be read"),
        ({"text": "x", "scheduler": "echo"}, "no use for it"),
        ({"wire": "v9"}, "no wire schema"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ("",)}, "stop"),
        ({"seed": 2**63}, "sampling_seed"),
        ({"seed": 2**63 - 2, "prompts": 4}, "sampling_seed"),
        ({"max_new_tokens": 8192}, "no room for a prompt"),
        ({"step_ms": float("inf")}, "--step-ms"),
        ({"step_ms": float("nan")}, "--step-ms"),
    ],
)
def test_a_mistake_is_found_before_anything_is_started(options, words):
    before = threading.active_count()
    with pytest.raises(HeadraceError, match=re.escape(words)) as caught:
        run(DemoOptions(plain=True, **options))
    assert "\n" not in caught.value.message
    assert threading.active_count() == before


def test_prompts_are_lines_without_their_ends_and_blank_ones_are_left_out(tmp_path, monkeypatch):
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffone\r\n\n  \n two \nthree\u2028still three".encode())
    assert read_prompts(str(file)) == ["one", " two ", "three\u2028still three"]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a\nb\n")))
    assert read_prompts("-") == ["a", "b"]
    file.write_bytes(b" \n\n")
    with pytest.raises(HeadraceError, match="no prompt"):
        read_prompts(str(file))
    file.write_bytes(b"a\xff")
    with pytest.raises(HeadraceError, match=r"UTF-8 \(byte 1\)"):
        read_prompts(str(file))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(HeadraceError, match="closed"):
        read_prompts("-")


def test_prompts_are_repeated_or_cut_to_the_asked_number():
    assert choose_prompts(["a", "b"], None) == ["a", "b"]
    assert choose_prompts(["a", "b"], 1) == ["a"]
    assert choose_prompts(["a", "b"], 5) == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("vocabulary", "eos"), [({"x": 0, "</s>": 1}, 1), ({"x": 0}, None), ({"<eos>": 0, "<|endoftext|>": 1}, 1)]
)
def test_the_end_of_a_text_is_found_by_its_usual_names(vocabulary, eos):
    from tokenizers import Tokenizer, models

    assert eos_id(Tokenizer(models.WordLevel(vocabulary))) == eos


# ---- how it looks


def test_control_characters_are_made_visible_and_harmless():
    assert printable("a\x1b[2Jb") == "a\\x1b[2Jb"
    assert printable("one\ntwo\tthree\r") == "one⏎two three "
    assert printable("\u202e\u2028\x9b") == "\\u202e\\u2028\\x9b"
    assert printable("naïve 日本 😀\u00a0") == "naïve 日本 😀\u00a0"
    assert printable("\ud800\U000e0001") == "\\ud800\\U000e0001"


def test_quantiles_are_values_that_were_seen():
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([float(n) for n in range(1, 101)], 0.5) == 50.0
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0


def board(clients) -> Board:
    ring = SimpleNamespace(fill=3, capacity=8)
    stats = SimpleNamespace(live={"STREAMING": 2, "QUEUED": 0}, ingress_ring=ring, egress_ring=ring)
    made = Board(title="title", clients=clients, began=0.0, now=2.0, token_name=str)
    for client in clients:
        made.tokens += client.tokens
        if client.began is not None:
            made.begin(client, client.began)
        if client.ended is not None:
            made.end(client, client.ended, client.outcome, client.reason)
    made.stats = stats
    made.decoder = "byte-level"
    return made


def mixed() -> list[Client]:
    return [
        Client(
            0, "It is", text=" a truth", tokens=2, began=0.0, first=0.5, ended=1.0, outcome="completed", reason="stop"
        ),
        Client(1, "Mr. Darcy", text=" said " * 60, tokens=60, began=0.0, first=0.6),
        Client(2, "evil\x1b[2J", text="\x07", tokens=1, began=0.0, first=0.7),
        Client(3, "late", began=1.5),
        Client(4, "full", began=1.0, ended=1.1, outcome="refused", reason="503 queue_full: the ring is full"),
        Client(5, "waits"),
    ]


@pytest.mark.parametrize(("width", "height"), [(110, 34), (80, 24), (40, 8), (20, 3)])
def test_the_live_view_shows_states_rings_speed_and_texts_and_never_wraps(width, height):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, color_system=None)
    view = LiveView(console)
    shown = board(mixed())
    console.print(view.picture(shown))
    shown.now = 3.0
    shown.tokens += 100
    console.print(view.picture(shown))
    out = console.file.getvalue()
    assert all(len(line) <= width for line in out.splitlines())
    assert "\x1b" not in out
    assert "\x07" not in out
    assert len(out.splitlines()) <= 2 * max(height, 12)
    if width >= 80:
        for words in (
            "STREAMING 2",
            "1 completed",
            "1 refused",
            "1 not yet submitted",
            "3 of 8",
            "byte-level",
            "100/s",
            "waiting",
            "said",
        ):
            assert words in out
        assert "QUEUED" not in out, "a state that nobody is in is not shown"


def test_a_terminal_that_knows_only_ascii_gets_ascii_bars():
    from rich.console import Console

    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    console = Console(file=file, width=100, height=30, color_system=None)
    console.print(LiveView(console).picture(board(mixed())))
    file.seek(0)
    assert "#########..............." in file.read()


def test_an_answers_line_says_how_it_ended():
    done, *_, refused, _ = mixed()
    assert answer_line(done) == "[1] It is | a truth (stop, 2 tokens)"
    assert answer_line(refused) == "[5] full | (refused: 503 queue_full: the ring is full)"


def test_the_summary_of_an_interrupted_run_says_what_is_missing():
    lines = summary_lines(board(mixed()))
    assert "requests        6: 1 completed, 0 failed, 1 refused, 4 not finished" in lines
    assert "speed           32 tokens/s over 2.00 s" in lines
    assert "error           1 x 503 queue_full: the ring is full" in lines
