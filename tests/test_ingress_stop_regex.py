"""Stop patterns: which are admitted, how wide they are, and that an admitted one never backtracks more than linearly.

Time proves nothing on a busy machine, so the proof counts the steps of a backtracking matcher (`ingress_helpers.StepCounter`).
"""

from __future__ import annotations

import re
import sys
import threading
from contextlib import suppress
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from headrace.codec import ValidationError, compile_stop_regex, stop_regex
from headrace.codec.limits import default
from hypothesis import given
from hypothesis import strategies as st
from ingress_helpers import StepCounter, TooManySteps, normalize, refusal

# Patterns that blow up, each with a text on which they do: (pattern, what is repeated, what follows).
BAD = [
    ("(a+)+b", "a", ""),
    ("(a*)*b", "a", ""),
    ("(a|a)*b", "a", ""),
    ("(a|aa)+b", "a", ""),
    ("(a|a?)+b", "a", ""),
    ("(x+x+)+y", "x", ""),
    ("([a-zA-Z]+)*1", "a", ""),
    (r"(\w+\s?)+x\.", "a", ""),
    (r"(\w*)*\d\.", "a", ""),
    ("(.*a){12}b", "a", ""),
    (".*.*x", "a", ""),
    ("a*a*b", "a", ""),
    ("a+?a+?b", "a", ""),
    ("a*[ab]*c", "a", ""),
    (".*a+b", "a", ""),
    ("[ab]*b+c", "b", ""),
    (r"<.*>.*</.*>", "<>", ""),
    (r"\s+\s+$", " ", "x"),
    (r"\s*\n\s*\nx", "\n", ""),
    ("(?i)k*\u212a*x", "k", ""),
    ("(?s)(.|\\n)*x", "\n", ""),
    ("(a*)\\1b", "a", ""),
    ("(a?){20}a{20}b", "a", ""),
    ("(a|b?a?){19}c", "a", ""),
    ("a*(?=.*x)b", "a", ""),
    ("(?:a(?=.*x))*b", "a", "x"),
    ("(?:a*b|a)*c", "a", ""),
    ("(?>a*b|a)*c", "a", ""),
    ("(?:a*b|a)*+c", "a", ""),
    ("a{0,500}a{0,500}b", "a", ""),
    ("(?:a{0,500}){2}b", "a", ""),
    ("((a+)b?)*c", "a", ""),
    ("(?=(a+)+b)a", "a", ""),
    ("(?!(a+)+b)c", "a", ""),
    ("(?>(a+)+b)c", "a", ""),
    ("é*[à-ü]*z", "é", ""),
    (r"\d*[0-9]*x", "1", ""),
    (r"(?a)\w*é*\w*x", "a", ""),
]

GOOD = {
    r"\d{6}": 6,
    r"\d+": 1 << 30,
    r"[ab]{2,5}": 5,
    r"\<END\>": 5,
    ".*x": 1 << 30,
    "foo|foobar": 6,
    "(foo|bar)+x": 1 << 30,
    "(a|ab)*c": 1 << 30,
    "\n\n+": 1 << 30,
    "</?tool>": 7,
    "(?i)stop": 4,
    r"(\w+\s)*x": 1 << 30,
    r"\b(the|this|that|those)\b": 5,
    r"(.)\1{9}": 10,
    "(?s)<a>.*</a>": 1 << 30,
    r"\s*\n": 1 << 30,
    "(?>a+)b": 1 << 30,
    "a*+b": 1 << 30,
    r"\w+@\w+\.com": 1 << 30,
    r"\d{1,3}(\.\d{1,3}){3}": 15,
    "x{1000}": 1000,
    '"[^"]*"': 1 << 30,
    "(?m)^User:": 5,
    "[А-я]+й": 1 << 30,
    r"\$\d+\.\d\d$": 1 << 30,
    "(?P<q>['\"]).*?(?P=q)": 1 << 30,
    "(a)?(?(1)b|c)": 2,
    "字": 1,
    "a{0,3}a{0,3}b": 7,
    "(ab|a)(b|c)d": 4,
    "\x00+": 1 << 30,
}


OURS = ("headrace.codec.stop_regex", "headrace.codec.regex_atoms")


def growth(pattern: str, pump: str, suffix: str, limit: int = 2_000_000) -> float:
    """How many times more steps a text of 480 characters takes than one of 240; infinite where they pass `limit`."""
    counter = StepCounter(pattern)
    try:
        few = counter.steps(pump * (240 // len(pump)) + suffix, limit)
        return counter.steps(pump * (480 // len(pump)) + suffix, limit) / few
    except TooManySteps:
        return float("inf")


@pytest.mark.parametrize(("pattern", "pump", "suffix"), BAD, ids=[ascii(p) for p, *_ in BAD])
def test_b18_every_pattern_of_the_bad_corpus_is_refused(pattern: str, pump: str, suffix: str) -> None:
    assert "may backtrack too much" in str(refusal(compile_stop_regex, pattern))


@pytest.mark.parametrize(("pattern", "pump", "suffix"), BAD, ids=[ascii(p) for p, *_ in BAD])
def test_the_bad_corpus_is_bad(pattern: str, pump: str, suffix: str) -> None:
    """The test above would pass for a rule that refuses everything; this one says that each refusal is deserved."""
    counter = StepCounter(pattern)
    assert growth(pattern, pump, suffix, 200_000) > 2.8 or counter.steps(pump * 40 + suffix) > 20_000


@pytest.mark.parametrize("pattern", GOOD, ids=ascii)
def test_ordinary_patterns_are_admitted_with_their_width(pattern: str) -> None:
    compiled, width = compile_stop_regex(pattern)
    assert compiled.pattern == pattern
    assert width == GOOD[pattern]


@pytest.mark.parametrize("pattern", GOOD, ids=ascii)
def test_ordinary_patterns_take_linear_steps(pattern: str) -> None:
    if "(?(" in pattern:
        assert not re.compile(pattern).search("")  # the counter has no conditionals
        return
    for pump in ("a", "b", "ab", "1", "1.", " ", "\n", "foo", "<a>", "a ", '"', "th"):
        assert growth(pattern, pump, "") < 2.6


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(", r"\p{L}", "(?<n>a)", "a(?i)b", "a{4294967295}", "a" * 300], ids=ascii
)
def test_b18_the_listed_patterns_are_refused_with_field_and_value(pattern: str) -> None:
    error = refusal(normalize, stop_regex=pattern)
    assert error.field == "stop_regex"
    assert pattern[:20].replace("\\", "\\\\") in str(error)


def test_b18_33_patterns_are_refused_and_32_admitted() -> None:
    assert "at most 32" in str(refusal(normalize, stop_regex=["a"] * 33))
    assert len(normalize(stop_regex=["a"] * 32).stop_regex_strs) == 32


def test_b18_a_pattern_of_256_bytes_is_admitted_and_of_257_refused_counted_in_utf8() -> None:
    assert normalize(stop_regex="字" * 85 + "a").stop_regex_max_len == 86
    assert "256" in str(refusal(normalize, stop_regex="字" * 85 + "ab"))


def test_b18_windows_are_those_of_the_engine_that_runs_the_pattern() -> None:
    assert normalize(stop_regex=r"\d{6}").stop_regex_max_len == 6
    assert normalize(stop_regex=r"\d+").stop_regex_max_len == 1 << 30
    assert normalize(stop_regex=r"\<END\>").stop_regex_max_len == 5
    assert normalize(stop_regex=["ab", r"\d{6}", "c"]).stop_regex_max_len == 6


@pytest.mark.parametrize(
    ("pattern", "text", "window"),
    [("(?<=abc)d", "abcd", 4), ("foo(?=bar)", "foobar", 6), ("(?<!ab)c(?!d)", "xxc", 4), ("(?:(?<=ab)c|d)(?=e.*f)", "abceef", 1 << 30), ("(?=(?<=a)bc)b", "abc", 4)],
)  # fmt: skip
def test_a_window_holds_what_lookarounds_see(pattern: str, text: str, window: int) -> None:
    """With the width of the match alone such a pattern never fires: a tail of one character holds no lookbehind of three."""
    compiled, width = compile_stop_regex(pattern)
    assert width == window
    assert compiled.search(text[-width:])


@pytest.mark.parametrize("pattern", ["", "a*", "^", "$", r"\b", "(?=a)", "a|", "(?!a)", "x{0}"])
def test_a_pattern_that_matches_nothing_would_stop_every_request_and_is_refused(pattern: str) -> None:
    refusal(compile_stop_regex, pattern)


@pytest.mark.parametrize("value", [5, None, b"a", ["a"], "\ud800"], ids=ascii)
def test_what_is_no_encodable_string_is_refused(value: object) -> None:
    refusal(compile_stop_regex, value)


@pytest.mark.parametrize("error", [OverflowError, RecursionError, MemoryError, KeyError, re.error])
def test_every_exception_class_of_the_compiler_becomes_a_validation_error(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(pattern: str) -> Any:
        raise error("boom")

    monkeypatch.setattr(re, "compile", explode)
    assert "boom" in str(refusal(compile_stop_regex, "a_pattern_not_cached"))


@pytest.mark.parametrize("pattern", ["[[a]", "[a--b]x", "[a&&b]", "[a~~b]", "[a||b]"])
def test_no_pattern_makes_the_compiler_warn(pattern: str, recwarn: pytest.WarningsRecorder) -> None:
    """A FutureWarning would print a client's pattern on standard error, and turns into an error under -W error."""
    refusal(compile_stop_regex, pattern)
    assert not recwarn


@pytest.mark.parametrize("pattern", [r"\[[ab]", r"[\[\]]x", "[]a]b", "[^]a]b", r"[a\-\-b]"])
def test_sets_that_are_not_ambiguous_are_admitted(pattern: str) -> None:
    compile_stop_regex(pattern)


@pytest.mark.parametrize(
    ("one", "other"),
    [("k", "(?i)\u212a"), ("s", "(?i)ſ"), ("K", "(?i)k"), ("é", "(?i)É"), ("\\w", "é"), ("\\s", "\u2003"), ("\\d", "٣"), ("[^a]", "字"), ("[à-ü]", "é"), (".", "字"), ("i", "(?i)İ"), ("(?i:ß)", "ẞ"), ("\\D", "字"), ("[^\\W]", "字")],
)  # fmt: skip
def test_pieces_that_match_a_common_character_are_never_taken_for_disjoint(one: str, other: str) -> None:
    flags = "(?i)" if "(?i)" in one + other else ""
    one, other = one.replace("(?i)", ""), other.replace("(?i)", "")
    refusal(compile_stop_regex, f"{flags}(?:{one})*(?:{other})*!")


@given(st.sampled_from("aAkKsSiIéÉßſ\u212aİıµΣσς1٣_ \u2003\n字-"), st.sampled_from([r"\w", r"\W", r"\d", r"\D", r"\s", r"\S", ".", "[^a]", "[a-z]", "[^a-zé]", "k", "é", "[à-ü]", "[^k]", "ſ"]), st.sampled_from(["", "i", "a", "s", "ia"]))  # fmt: skip
def test_the_first_characters_of_an_item_cover_all_it_matches(char: str, item: str, flags: str) -> None:
    pattern = (f"(?{flags})" if flags else "") + f"{item}{re.escape(char)}*"
    tree = sre_parser.parse(pattern)
    analysis = stop_regex._Analysis(tree)
    if re.compile((f"(?{flags})" if flags else "") + item).match(char):
        op, arg = tree.data[0]
        exact = analysis.atoms.span(ord(char), ord(char) + 1)
        assert analysis.atoms.of(op, arg, analysis.flags) & exact


_piece = st.sampled_from(
    ["a", "b", "[ab]", ".", "c", "[^a]", "$", "(?=a)", r"\b", "(?=.*c)", "(?!b)", "(?<=a)", "(?>a|ab)"]
)
_count = st.sampled_from(["*", "+", "?", "{0,2}", "{2}", "{1,3}", "*?", "+?", "*+", "++", "{2,}", "{0,70}"])
_patterns = st.recursive(
    _piece,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda arms: f"(?:{'|'.join(arms)})"),
        st.builds("(?:{}){}".format, inner, _count),
        st.builds("(?>{})".format, inner),
    ),
    max_leaves=7,
)


@given(_patterns, st.sampled_from(["a", "b", "ab", "aab", "abb", "ac"]), st.sampled_from(["", "c", "a", "b", "d"]))
def test_whatever_is_admitted_takes_linear_steps(pattern: str, pump: str, suffix: str) -> None:
    try:
        compile_stop_regex(pattern)
    except ValidationError:
        return
    assert growth(pattern, pump, suffix) < 2.6


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("_product", lambda a, b, what: stop_regex._Cost(min(1, a.long + b.long), min(256, a.factor * b.factor))),
        ("_LONG_BODY", None),
    ],
    ids=["no limit on what follows a choice", "no limit on a long body"],
)
def test_an_analysis_without_one_of_its_rules_admits_bad_patterns(
    name: str, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without is not None:
        monkeypatch.setattr(stop_regex, name, without)
    else:
        real = stop_regex._Analysis.repeat

        def lenient(self: Any, *args: Any) -> Any:
            try:
                return real(self, *args)
            except stop_regex._Inadmissible:
                return args[5]._replace(ways=stop_regex._ONE)

        monkeypatch.setattr(stop_regex._Analysis, "repeat", lenient)
    admitted = 0
    for pattern, *_ in BAD:
        tree = sre_parser.parse(pattern)
        try:
            stop_regex._Analysis(tree).run()
            admitted += 1
        except stop_regex._Inadmissible:
            pass
    assert admitted > 5


@pytest.mark.parametrize("body", [r"\b", "(?=a)", "a?", "(?!b)", "(?:|a)", "(?<=a)", "$", "(?>a?)", "a{0}"])
@pytest.mark.parametrize("count", ["{60}", "{2,60}", "{60}+", "{60}?", "{99}"])
def test_nested_rounds_that_use_up_no_text_are_refused_before_anything_is_matched(body: str, count: str) -> None:
    """60 to the 20th steps on any text, the empty one included: this test hangs where the order is wrong."""
    depth = 20
    refusal(compile_stop_regex, "(?:" * depth + body + f"){count}" * depth + "x")


@pytest.mark.parametrize(
    ("head", "tail"),
    [("(", "){2}"), ("(?>", ")"), ("(?:", "){1,2}"), ("(?=", ")"), ("(?=a", ")"), ("(?:a", ")?"), ("(a|", "b)"), (r"(\w", r"\w)"), ("(?<=a)(?:", "b)"), ("(?!", "c)"), ("(?=", "a)?"), ("(?:a", ")*+")],
)  # fmt: skip
def test_nesting_costs_no_exponential_work(head: str, tail: str) -> None:
    """Counted in calls of our own functions, for depths d and 2d: the work may grow with the square, not with a power."""

    def calls(depth: int) -> int:
        pattern = head * depth + "a" + tail * depth
        count = 0

        def note(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call" and frame.f_globals.get("__name__", "") in OURS

        sys.setprofile(note)
        try:
            with suppress(ValidationError):
                stop_regex._judge(pattern)
        finally:
            sys.setprofile(None)
        return count

    depth = 120 // len(head + tail)
    assert calls(2 * depth) < 4.5 * calls(depth) + 200


def test_successes_are_compiled_once_and_a_full_cache_is_cleared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "_cache", {})
    judged: list[object] = []
    real = stop_regex._judge

    def noted(pattern: object) -> Any:
        judged.append(pattern)
        return real(pattern)

    monkeypatch.setattr(stop_regex, "_judge", noted)
    assert compile_stop_regex("ab") is compile_stop_regex("ab")
    assert judged == ["ab"]
    for _ in range(2):
        refusal(compile_stop_regex, "(")
    assert judged == ["ab", "(", "("]
    for at in range(default("regex_cache_size")):
        compile_stop_regex(f"x{at}")
        assert len(stop_regex._cache) <= default("regex_cache_size")
    assert "ab" not in stop_regex._cache


def test_the_cache_may_be_used_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "_cache", {})
    failures: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for at in range(400):
                compiled, width = compile_stop_regex(f"y{(at + offset) % 700}z")
                assert compiled.pattern == f"y{(at + offset) % 700}z"
                assert width == len(compiled.pattern)
        except BaseException as failure:
            failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(170 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert len(stop_regex._cache) <= default("regex_cache_size")
