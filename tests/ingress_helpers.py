"""Shared by the ingress tests: rules, a short way through admission, and a backtracking matcher that counts its steps."""

from __future__ import annotations

import json
import re
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from headrace.codec import (
    AdmissionRules,
    GenerateBody,
    NormalizedRequest,
    SamplingParams,
    ValidationError,
    admit,
    load_schema,
)

V1, V2 = load_schema("v1"), load_schema("v2")
RULES = AdmissionRules(context_len=4096, vocab_size=100, enable_return_hidden_states=True)


def admit_body(body: Any, rules: AdmissionRules = RULES, schema: Any = V2) -> list[NormalizedRequest]:
    """The whole way of a body up to the tokenizer."""
    return [admit(request, rules, schema) for request in GenerateBody.from_json(body).requests()]


def refusal(call: Any, *args: Any, **kwargs: Any) -> ValidationError:
    """The ValidationError that `call` raises, checked to be printable, encodable and a 400."""
    with pytest.raises(ValidationError) as caught:
        call(*args, **kwargs)
    error = caught.value
    assert error.http_status == 400
    str(error).encode("utf-8")
    assert json.loads(json.dumps(error.to_dict(), allow_nan=False).encode("utf-8")) == error.to_dict()
    return error


def normalize(vocab_size: int = 100, skip_tokenizer_init: bool = False, **fields: Any) -> Any:
    return SamplingParams(**fields).normalize(vocab_size=vocab_size, skip_tokenizer_init=skip_tokenizer_init)


class TooManySteps(Exception):
    pass


class StepCounter:
    """A backtracking matcher for Python's patterns that counts instructions instead of measuring time.

    It compiles the parse tree into the textbook program (char, split, jump, save, lookaround, atomic group) and runs it with an
    explicit stack, trying the ways in the order the real engine does.
    """

    def __init__(self, pattern: str) -> None:
        tree = sre_parser.parse(pattern)
        self.code: list[tuple[Any, ...]] = []
        self.registers = 2 * tree.state.groups
        self.seq(tree, tree.state.flags)
        self.code.append(("match",))

    def emit(self, *instruction: Any) -> int:
        self.code.append(instruction)
        return len(self.code) - 1

    def seq(self, tree: Any, flags: int) -> None:
        for op, arg in tree.data:
            self.item(op, arg, flags)

    def item(self, op: Any, arg: Any, flags: int) -> None:
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            self.emit("char", op, arg, flags)
        elif op is sre.SUBPATTERN:
            group, add, drop, body = arg
            if group is not None:
                self.emit("save", 2 * group)
            self.seq(body, (flags | add) & ~drop)
            if group is not None:
                self.emit("save", 2 * group + 1)
        elif op is sre.BRANCH:
            ends = []
            for body in arg[1][:-1]:
                split = self.emit("split", 0, 0)
                self.seq(body, flags)
                ends.append(self.emit("jump", 0))
                self.code[split] = ("split", split + 1, len(self.code))
            self.seq(arg[1][-1], flags)
            for end in ends:
                self.code[end] = ("jump", len(self.code))
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            self.repeat(arg[0], arg[1], arg[2], flags, op is sre.MIN_REPEAT)
        elif op in (sre.POSSESSIVE_REPEAT, sre.ATOMIC_GROUP, sre.ASSERT, sre.ASSERT_NOT):
            kind = {sre.ASSERT: "ahead", sre.ASSERT_NOT: "not"}.get(op, "atomic")
            back = 0
            if kind != "atomic" and arg[0] < 0:
                back = arg[1].getwidth()[0]
            call = self.emit(kind, 0, back)
            if op is sre.POSSESSIVE_REPEAT:
                self.repeat(arg[0], arg[1], arg[2], flags, False)
            else:
                self.seq(arg if op is sre.ATOMIC_GROUP else arg[1], flags)
            self.emit("match")
            self.code[call] = (kind, len(self.code), back)
        elif op is sre.AT:
            self.emit("at", arg)
        elif op is sre.GROUPREF:
            self.emit("ref", arg)
        elif op is sre.FAILURE:
            self.emit("fail")
        else:
            raise NotImplementedError(op)

    def repeat(self, low: Any, high: Any, body: Any, flags: int, lazy: bool) -> None:
        low, unbounded = int(low), high is sre.MAXREPEAT
        for _ in range(low):
            self.seq(body, flags)

        def split(here: int, out: int) -> tuple[str, int, int]:
            return ("split", out, here + 1) if lazy else ("split", here + 1, out)

        if unbounded:
            register, self.registers = self.registers, self.registers + 1
            top = self.emit("split", 0, 0)
            self.emit("save", register)
            self.seq(body, flags)
            self.emit("moved", register)
            self.emit("jump", top)
            self.code[top] = split(top, len(self.code))
        else:
            splits = []
            for _ in range(int(high) - low):
                splits.append(self.emit("split", 0, 0))
                self.seq(body, flags)
            for at in splits:
                self.code[at] = split(at, len(self.code))

    def steps(self, text: str, limit: int = 10_000_000) -> int:
        """Instructions until the pattern has matched or failed at the start of `text`; TooManySteps beyond `limit`."""
        self.count, self.limit, self.text = 0, limit, text
        self.run(0, 0, (0,) * self.registers)
        return self.count

    def run(self, pc: int, pos: int, saved: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
        stack = [(pc, pos, saved)]
        text = self.text
        while stack:
            pc, pos, saved = stack.pop()
            while True:
                self.count += 1
                if self.count > self.limit:
                    raise TooManySteps
                op = self.code[pc]
                kind = op[0]
                if kind == "match":
                    return pos, saved
                if kind == "char":
                    if pos >= len(text) or not _matches(op[1], op[2], op[3], text[pos]):
                        break
                    pos += 1
                elif kind == "split":
                    stack.append((op[2], pos, saved))
                    pc = op[1]
                    continue
                elif kind == "jump":
                    pc = op[1]
                    continue
                elif kind == "save":
                    saved = (*saved[: op[1]], pos, *saved[op[1] + 1 :])
                elif kind == "moved":
                    if saved[op[1]] == pos:
                        break
                elif kind == "at":
                    if not _at(op[1], text, pos):
                        break
                elif kind == "ref":
                    piece = text[saved[2 * op[1]] : saved[2 * op[1] + 1]]
                    self.count += len(piece)
                    if not text.startswith(piece, pos):
                        break
                    pos += len(piece)
                elif kind == "fail":
                    break
                else:
                    inner = self.run(pc + 1, pos - op[2], saved) if pos >= op[2] else None
                    if (inner is None) != (kind == "not"):
                        break
                    if kind == "atomic" and inner is not None:
                        pos, saved = inner
                    pc = op[1]
                    continue
                pc += 1
        return None


def _matches(op: Any, arg: Any, flags: int, char: str) -> bool:
    if flags & re.IGNORECASE and op in (sre.LITERAL, sre.NOT_LITERAL):
        return (re.fullmatch(re.escape(chr(arg)), char, re.IGNORECASE) is not None) == (op is sre.LITERAL)
    if op is sre.ANY:
        return bool(flags & re.DOTALL) or char != "\n"
    if op is sre.LITERAL:
        return bool(ord(char) == arg)
    if op is sre.NOT_LITERAL:
        return bool(ord(char) != arg)
    hit = negated = False
    for item, value in arg:
        if item is sre.NEGATE:
            negated = True
        elif item is sre.LITERAL:
            hit = hit or ord(char) == value
        elif item is sre.RANGE:
            hit = hit or value[0] <= ord(char) <= value[1]
        elif item is sre.CATEGORY:
            name = str(value).removeprefix("CATEGORY_")
            letter = name.removeprefix("NOT_")[0].lower()
            hit = hit or (re.match("\\" + letter, char) is not None) != name.startswith("NOT_")
    return hit != negated


def _at(where: Any, text: str, pos: int) -> bool:
    if where is sre.AT_END:
        return pos == len(text) or (pos == len(text) - 1 and text[pos] == "\n")
    if where is sre.AT_END_STRING:
        return pos == len(text)
    if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return pos == 0
    words = [0 <= at < len(text) and re.match(r"\w", text[at]) is not None for at in (pos - 1, pos)]
    return (words[0] != words[1]) == (where is sre.AT_BOUNDARY)
