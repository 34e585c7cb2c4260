"""What a run looks like: on a terminal, as JUnit XML, and as a page of HTML.

Owns: the words and shapes of reports. Rules it keeps: every text of a target is data (escaped in XML and HTML, made harmless and
short on a terminal); "not applicable" is shown as skipped with its reason, never as passed; a failed case comes with the command that
replays it and its last frame for `headrace inspect`.
"""

from __future__ import annotations

import html
from collections import defaultdict
from xml.sax.saxutils import escape, quoteattr

from .runner import FAILED, KNOWN, NOT_APPLICABLE, PASSED, SURPRISE, Outcome, Report, replay_command

_MOST_HEX = 400


def line(outcome: Outcome) -> str:
    """One line on an outcome that is worth one."""
    why = f": {outcome.message}" if outcome.message else ""
    known = f" ({outcome.known})" if outcome.known else ""
    level = "" if outcome.case.must else " (SHOULD)"
    return f"{outcome.status:<14} {outcome.id}{level}  clause {outcome.case.clause}{why}{known}"


def inspect_command(outcome: Outcome) -> str:
    """A command that shows the last frame that the case pushed; empty where it pushed none."""
    if not outcome.frames:
        return ""
    digits = outcome.frames[-1].hex()
    if len(digits) > _MOST_HEX:
        return f"(its last frame has {len(digits) // 2} bytes: the replay keeps it as a file)"
    return f"echo {digits} | headrace inspect --hex --wire {outcome.wire} -"


def details(report: Report, outcome: Outcome) -> list[str]:
    """What is printed below a failed case."""
    lines = [f"    {outcome.case.about}"] if outcome.case.about else []
    lines.append(f"    replay:  {replay_command(report, outcome)}")
    shown = inspect_command(outcome)
    return [*lines, f"    frame:   {shown}"] if shown else lines


def summary(report: Report) -> list[str]:
    """The end of a run on a terminal."""
    hello, counts = report.hello, report.counts
    should = sum(outcome.status == FAILED and not outcome.case.must for outcome in report.outcomes)
    lines = [
        f"target    {hello['name']} {hello['version']}, wires {', '.join(hello['wires'])}",
        (
            f"cases     {counts[PASSED]} passed, {counts[FAILED]} failed ({should} of them SHOULD), {counts[KNOWN]} known "
            f"failures, {counts[SURPRISE]} pass though known to fail, {counts[NOT_APPLICABLE]} not applicable, "
            f"{report.seconds:.1f} s"
        ),
    ]
    by_reason: dict[str, int] = defaultdict(int)
    for outcome in report.outcomes:
        if outcome.status == NOT_APPLICABLE:
            by_reason[outcome.message] += 1
    lines += [f"          not applicable: {count} because {reason}" for reason, count in sorted(by_reason.items())]
    lines += [f"stale     the known-failures file names {name}, which did not run" for name in report.stale]
    lines.append("verdict   conforms" if report.ok else "verdict   does not conform")
    return lines


def junit(report: Report) -> str:
    """JUnit XML: one suite per suite of the kit, one case per case and wire revision."""
    out = ['<?xml version="1.0" encoding="UTF-8"?>', "<testsuites>"]
    suites: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in report.outcomes:
        suites[outcome.case.suite].append(outcome)
    for suite, outcomes in suites.items():
        failures = sum(outcome.bad for outcome in outcomes)
        skipped = sum(not outcome.bad and outcome.status != PASSED for outcome in outcomes)
        out.append(
            f'<testsuite name="conformance.{suite}" tests="{len(outcomes)}" failures="{failures}" errors="0" '
            f'skipped="{skipped}" time="{sum(outcome.seconds for outcome in outcomes):.3f}">'
        )
        for outcome in outcomes:
            out.append(
                f"<testcase classname={_attribute(f'conformance.{suite}')} name={_attribute(outcome.id)} "
                f'time="{outcome.seconds:.3f}">'
            )
            if outcome.bad:
                text = "\n".join([outcome.message, *details(report, outcome)])
                out.append(
                    f"<failure message={_attribute(outcome.message or outcome.status)}>{escape(_safe(text))}</failure>"
                )
            elif outcome.status != PASSED:
                reason = f"{outcome.status}: {outcome.known or outcome.message}"
                out.append(f"<skipped message={_attribute(reason)}/>")
            out.append("</testcase>")
        out.append("</testsuite>")
    if report.stale:
        out.append(
            f'<testsuite name="conformance.known-failures" tests="{len(report.stale)}" failures="{len(report.stale)}">'
        )
        out += [
            f'<testcase classname="known-failures" name={_attribute(name)}><failure message="did not run"/></testcase>'
            for name in report.stale
        ]
        out.append("</testsuite>")
    return "\n".join([*out, "</testsuites>"]) + "\n"


def _safe(text: str) -> str:
    """What XML 1.0 cannot hold, escaped as Python would."""
    return "".join(
        char
        if char in "\t\n" or (char >= " " and not "\ud800" <= char <= "\udfff" and char not in "\ufffe\uffff")
        else ascii(char)[1:-1]
        for char in text
    )


def _attribute(text: str) -> str:
    return quoteattr(_safe(text).replace("\n", " "))


def page(report: Report) -> str:
    """The run as one page of HTML without scripts or outside parts."""
    rows = []
    for outcome in report.outcomes:
        more = ""
        if outcome.status in (FAILED, SURPRISE):
            more = "<pre>" + html.escape("\n".join(part.strip() for part in details(report, outcome))) + "</pre>"
        rows.append(
            f'<tr class="{outcome.status.split()[0].rstrip(",")}"><td>{html.escape(outcome.id)}</td><td>{outcome.case.clause}</td>'
            f"<td>{outcome.case.level}</td><td>{outcome.status}</td>"
            f"<td>{html.escape(outcome.message)} {html.escape(outcome.known)}{more}</td></tr>"
        )
    head = "<br>".join(html.escape(part) for part in summary(report))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>headrace conformance</title><style>'
        "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .5em;"
        "text-align:left;vertical-align:top}.passed td:nth-child(4){background:#dfd}.failed td:nth-child(4){background:#fcc}"
        ".passes td:nth-child(4){background:#fcc}.known td:nth-child(4){background:#ffd}.not td{color:#888}"
        "pre{white-space:pre-wrap;font-size:12px}</style></head><body>"
        f"<h1>Conformance of {html.escape(str(report.hello['name']))}</h1><p>{head}</p>"
        "<table><tr><th>case</th><th>clause</th><th>level</th><th>outcome</th><th>why</th></tr>"
        f"{''.join(rows)}</table></body></html>\n"
    )
