"""The report for people who were not there: one page that needs nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Final

from oncekey.conformance.causes import Group
from oncekey.conformance.clauses import Area, Failed, Skipped
from oncekey.conformance.curl import shortened, transcript
from oncekey.conformance.invocation import invocation
from oncekey.conformance.references import references
from oncekey.conformance.repeating import script
from oncekey.conformance.running import MOST_DANGEROUS, Finding, Report

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; --warn: #b26a00; --dim: #777; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.verdict { font-size: 1.1rem; padding: .8rem 1rem; border-left: .4rem solid var(--good); background: #8881; }
.verdict.bad { border-color: var(--bad); }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; font-weight: 600; padding: .6rem 0; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td:first-child { width: 6rem; font-weight: 600; } code, pre { font: .85rem/1.45 ui-monospace, monospace; }
.FAILED { color: var(--bad); } .passed { color: var(--good); } .advice { color: var(--warn); }
.skipped, .undecided, .known, .dim { color: var(--dim); }
article { border: 1px solid var(--line); padding: .2rem 1rem 1rem; margin: 1rem 0; }
article.FAILED { border-left: .4rem solid var(--bad); color: inherit; }
pre { background: #8881; padding: .7rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def to_html(report: Report) -> str:
    """The page."""
    groups = report.groups
    title = f"Idempotency of {report.target.method} {report.target.address}"
    began = datetime.fromtimestamp(report.began_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    run = f"{report.sent} requests in {report.seconds:.0f} seconds"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">oncekey {escape(report.version)}, profile {escape(report.profile)}, {began}: {run}</p>',
        _verdict(report),
        _findings("What is wrong, the worst first", groups[:MOST_DANGEROUS], report),
        _findings("Also wrong", groups[MOST_DANGEROUS:], report),
        _findings("Known, and in the baseline", [Group(finding) for finding in report.known_findings], report),
        _findings("Advice", [Group(finding) for finding in report.advice], report),
        f"<h2>The run</h2>\n<pre>{escape(invocation(report.target, report.profile))}</pre>",
        "<h2>All clauses</h2>",
        *(_area(area, report) for area in Area),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _verdict(report: Report) -> str:
    kept = f"{len(report.passed)} passed, {len(report.failed)} failed, {len(report.advice)} advice, "
    kept += f"{len(report.skipped)} skipped, {len(report.undecided)} undecided."
    matches = ", ".join(report.matches) or "none"
    bad = " bad" if report.failed else ""
    word = "Promises are broken." if report.failed else "No promise that could be judged is broken."
    return f'<p class="verdict{bad}"><strong>{word}</strong> {kept} Profiles of which none is broken: {matches}.</p>'


def _findings(heading: str, groups: list[Group], report: Report) -> str:
    if not groups:
        return ""
    return "\n".join([f"<h2>{heading}</h2>", *(_group(group, report) for group in groups)])


def _group(group: Group, report: Report) -> str:
    follow = "\n".join(_consequence(finding, report) for finding in group.consequences)
    heading = f"<p>From the same cause, {len(group.consequences)} more:</p>" if follow else ""
    return (
        f'<article class="{report.word(group.root)}" id="{escape(group.root.clause.id)}">'
        f"<h3>{escape(group.root.headline)}</h3>{_finding(group.root, report)}{heading}{follow}</article>"
    )


def _consequence(finding: Finding, report: Report) -> str:
    return (
        f'<details id="{escape(finding.clause.id)}"><summary>{escape(finding.headline)}</summary>'
        f"{_finding(finding, report)}</details>"
    )


def _finding(finding: Finding, report: Report) -> str:
    clause, verdict = finding.clause, finding.verdict
    assert isinstance(verdict, Failed)
    assert finding.harm is not None
    exchange = "\n\n".join(map(transcript, shortened(verdict.exchange)))
    texts = ", ".join(f'<a href="{escape(one.url)}">{escape(one.name)}</a>' for one in references(clause.id))
    lines = "\n".join(script(report.target, verdict.exchange))
    return (
        f'<p><span class="dim">{finding.harm.words}; {clause.severity.name.lower()}; {escape(clause.id)}</span><br>'
        f"<strong>Promise</strong> {escape(report.spoken(clause.title))}. {escape(clause.why)}<br>"
        f"<strong>Expected</strong> {escape(verdict.expected)}<br><strong>Seen</strong> {escape(verdict.seen)}<br>"
        f"<strong>Read</strong> {texts}</p>"
        f"<details><summary>A script that repeats it</summary><pre>{escape(lines)}</pre></details>"
        f"<details><summary>What went over the wire</summary><pre>{escape(exchange)}</pre></details>"
    )


def _area(area: Area, report: Report) -> str:
    found = [finding for finding in report.asked if finding.clause.area is area]
    if not found:
        return ""
    rows = "\n".join(_row(finding, report) for finding in found)
    head = '<tr><th scope="col">Result</th><th scope="col">Clause</th></tr>'
    return f"<table><caption>{escape(area.value.capitalize())}</caption>\n{head}\n{rows}\n</table>"


def _row(finding: Finding, report: Report) -> str:
    word, verdict = report.word(finding), finding.verdict
    more = ""
    if isinstance(verdict, Skipped):
        told = f"; pass <code>{escape(verdict.pass_this)}</code>" if verdict.pass_this else ""
        more = f'<br><span class="dim">{escape(verdict.because)}{told}</span>'
    elif isinstance(verdict, Failed) and word != "passed":
        more = f'<br><a href="#{escape(finding.clause.id)}">{escape(finding.headline)}</a>'
    return f'<tr><td class="{word}">{word}</td><td>{escape(report.spoken(finding.clause.title))}{more}</td></tr>'
