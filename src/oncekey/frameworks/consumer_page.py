"""The page for the consumers of an API, which every refusal links to. It is generated from the routes' settings."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Final

from oncekey.core.answers import Answer
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import Code, Effects
from oncekey.core.policy import Flavor, InProgress, OnExpired, Policy
from oncekey.core.problems import PROBLEMS
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.frameworks.openapi import statuses_of

if TYPE_CHECKING:
    from oncekey.frameworks.shared import ApplicationShared

_SYNTAX: Final = {
    HeaderSyntax.STRICT: 'in double quotes (<code>"8e03978e-…"</code>, a structured-field string)',
    HeaderSyntax.COMPAT: "with or without double quotes; both forms mean the same key",
    HeaderSyntax.BARE: "bare, without quotes",
}
_STATES: Final = (
    ("pending", "accepted; a worker will execute it"),
    ("in_progress", "running"),
    ("completed", "done; <code>response</code> contains the stored response"),
    ("failed_retryable", "not finished; a retry with the same key executes it, or completes what is left"),
    ("unknown", "it may have been executed; a retry does not execute it again"),
)
_FLAVORS: Final = {Flavor.IETF: "the IETF draft", Flavor.STRIPE: "Stripe's API"}
_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--shade:#f3f5f7;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa5b1;--line:#3a424c;--shade:#1c2128;--page:#0f1318}}
*{box-sizing:border-box}
body{font:16px/1.6 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:52rem;margin:0 auto;
padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 1rem}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;padding-top:.75rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.5rem 0 .25rem;scroll-margin-top:1rem}
h3:target{background:var(--shade)}
p,ul{margin:.5rem 0 1rem}
li{margin:.35rem 0}
code{font:.9em ui-monospace,monospace;overflow-wrap:anywhere}
pre{background:var(--shade);border:1px solid var(--line);border-radius:6px;padding:.75rem 1rem;white-space:pre-wrap}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1rem}
th,td{text-align:left;vertical-align:top;padding:.45rem .75rem .45rem 0;border-bottom:1px solid var(--line)}
tbody tr:last-child td{border-bottom:0}
th{color:var(--soft);font-weight:600}
th:first-child{min-width:9rem}
@media(max-width:40rem){
thead{display:none}
tr{display:block;padding:.5rem 0}
tr+tr{border-top:1px solid var(--line)}
td{display:block;border:0;padding:.1rem 0}
td:first-child,td:first-child code{font-weight:600}
ul{padding-left:1.25rem}
td[data-label]::before{content:attr(data-label) ": ";color:var(--soft)}
}
"""


def documentation(shared: ApplicationShared) -> Answer:
    """The page of an application."""
    body = page(shared.policy, protected(shared), shared.status_path).encode()
    headers = (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"max-age=300"),
    )
    return Answer(200, headers, body)


def protected(shared: ApplicationShared) -> dict[str, Enrolment]:
    """The protected routes by method and path; by pattern if the application does not list its routes."""
    routes = shared.routes()
    if routes is None:
        return {pattern.text: one for pattern, one in zip(shared.patterns.patterns, shared.patterns, strict=True)}
    found: dict[str, Enrolment] = {}
    for route in sorted(routes, key=lambda one: one.path):
        for method in sorted(route.changing):
            enrolment = route.enrolment(method)
            if enrolment is not None and enrolment.owner is shared.engines:
                found[f"{method} {route.path}"] = enrolment
    return found


def page(policy: Policy, routes: dict[str, Enrolment], status_path: str | None) -> str:
    """The page as HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Retrying requests safely</title><style>{_STYLE}</style></head><body><main>
<h1>Retrying requests safely</h1>
<p>Send a new random key with each new request that changes something, and the same key with every retry of that
request. The request is executed once, and each retry receives the original response.</p>
<pre><code>{policy.key_header}: {_example(policy)}</code></pre>
<ul>
<li>Create the key before the first attempt: {_key_rules(policy)}. No personal data.</li>
<li>On {", ".join(sorted(SAFE - {"TRACE"}))} the header has no effect.</li>
<li>Keys are valid for {_span(policy.ttl)}{_unless(routes)}. Within that time, a repeat receives the status and body of
the first response, with <code>{escape(policy.replayed_header)}: true</code>;
<code>{escape(policy.expires_header)}</code> is the end of that time.</li>
<li>The same key with another request receives {PROBLEMS[Code.KEY_REUSED].status_in(policy.flavor)}, and nothing is
executed.{" Each operation has its own keys." if policy.separate_operations else ""}</li>
</ul>
{_routes(routes)}<h2 id="retry">When to retry</h2>
{_table("Response", "What to do", _REACTIONS)}
<h2 id="status">The state of a request</h2>
{_status(status_path, policy)}
<h2 id="expiry">After a key has expired</h2>
{_expiry(policy)}
<h2 id="problems">Problems</h2>
<p>Status codes follow {_FLAVORS[policy.flavor]}. The header is described by
draft-ietf-httpapi-idempotency-key-header-07, an IETF draft that has expired and is not a standard.</p>
{_problems(policy, routes)}
</main></body></html>
"""


_REACTIONS: Final = (
    ("none: a time-out or a lost connection", "retry with the same key, with exponential backoff and jitter"),
    ("2xx, 3xx", "done; after a redirect to a login, log in, then send the same request with the same key"),
    ("202 or 409 with <code>Retry-After</code>", "wait that long, then send the same request and key"),
    ("408, 425, 429, 5xx", "retry with the same key, after <code>Retry-After</code> if it is there"),
    ("401, 403", "authenticate, then send the same request with the same key"),
    ("other 4xx", "do not retry: fix the request and send it with a new key"),
    ("any response marked as a replay", "do not retry: it is final"),
)


def _example(policy: Policy) -> str:
    key = "8e03978e-40d5-43e8-bc93-6894a57f9324"
    return key if policy.header_syntax is HeaderSyntax.BARE else f'"{key}"'


def _key_rules(policy: Policy) -> str:
    if policy.key_format is KeyFormat.UUID:
        return f"a UUID, {_SYNTAX[policy.header_syntax]}"
    return f"{policy.shortest_key} to {policy.max_key_length} characters, {_SYNTAX[policy.header_syntax]}"


def _unless(routes: dict[str, Enrolment]) -> str:
    lives = {enrolment.policy.ttl for enrolment in routes.values()}
    return " unless listed otherwise below" if len(lives) > 1 else ""


def _span(span: timedelta) -> str:
    hours = span.total_seconds() / 3600
    for size, unit in ((24, "day"), (1, "hour"), (1 / 60, "minute")):
        count = hours / size
        if count >= 2 and count == int(count):  # noqa: PLR2004  ("24 hours" is as common as "1 day")
            return f"{int(count)} {unit}s"
    return f"{hours:g} hours"


def _routes(routes: dict[str, Enrolment]) -> str:
    if not routes:
        return ""
    rows = "\n".join(
        f"<tr><td><code>{escape(name)}</code>{_operation(one)}</td>"
        f'<td data-label="Key">{"required" if one.policy.require_key else "optional"}, {_key_rules(one.policy)}</td>'
        f'<td data-label="Valid for">{_span(one.policy.ttl)}</td>'
        f'<td data-label="While the first request runs">{_waiting(one)}</td></tr>'
        for name, one in routes.items()
    )
    return f"""<h2 id="routes">Routes that take a key</h2>
<table><thead><tr><th>Route</th><th>Key</th><th>Valid for</th><th>While the first request runs</th></tr></thead>
<tbody>
{rows}
</tbody></table>
"""


def _operation(enrolment: Enrolment) -> str:
    """The operation's name for the status resource, if each operation has its own keys."""
    named = f" operation <code>{escape(enrolment.operation)}</code>"
    return named if enrolment.policy.separate_operations else ""


def _waiting(enrolment: Enrolment) -> str:
    policy = enrolment.policy
    if enrolment.effects is Effects.OUTBOX:
        return "202 with <code>Location</code> and <code>Retry-After</code>; 409 before it is accepted"
    match policy.on_in_progress:
        case InProgress.CONFLICT:
            return "409 with <code>Retry-After</code>"
        case InProgress.ACCEPTED:
            return "202 with <code>Location</code> and <code>Retry-After</code>"
        case InProgress.WAIT:
            seconds = f"{policy.wait_max.total_seconds():g}"
            return f"the first request's response, for up to {seconds} seconds; then 409 with <code>Retry-After</code>"


def _status(path: str | None, policy: Policy) -> str:
    if path is None:
        return "<p>Send the request again with the same key: the response shows the outcome of the first one.</p>"
    rows = [(f"<code>{name}</code>", meaning) for name, meaning in _STATES]
    whose = "?operation={operation}" if policy.separate_operations else ""
    return f"""<p><code>GET {escape(path)}/{{key}}{whose}</code> returns the state of your request. Use the
credentials of the request, and percent-encode the key, without quotes. Until the request is finished, the response has
<code>Retry-After</code>.</p>
{_table("State", "Meaning", rows)}
<p>404: the key does not exist, has expired, or belongs to another caller.</p>"""


def _expiry(policy: Policy) -> str:
    if policy.on_expired is OnExpired.GONE:
        what = (
            f"A request with an expired key receives {PROBLEMS[Code.KEY_EXPIRED].status_in(policy.flavor)}, and "
            "nothing is executed."
        )
    else:
        what = "An expired key is forgotten: a request with it is a new request, and is executed again."
    if policy.max_request_age is not None:
        what += (
            f" A request whose <code>Idempotency-First-Sent</code> is more than {_span(policy.max_request_age)} ago "
            f"receives {PROBLEMS[Code.REQUEST_TOO_OLD].status_in(policy.flavor)} instead."
        )
    return (
        f"<p>{what} Stop retrying before a key expires. After that, find out whether the operation was executed, and "
        "send it with a new key only if it was not. A request that is not finished, or whose outcome is unknown, does "
        "not expire.</p>"
    )


def _problems(policy: Policy, routes: dict[str, Enrolment]) -> str:
    sections = []
    for code, problem in PROBLEMS.items():
        enrolled = [statuses_of(code, one.policy, one.effects) for one in routes.values()]
        found = sorted({status for statuses in enrolled for status in statuses} or {problem.status_in(policy.flavor)})
        statuses = " or ".join(map(str, found))
        heading = f'<h3 id="{escape(problem.slug)}">{statuses} <code>{code.value}</code></h3>'
        sections.append(f"{heading}\n<p>{escape(problem.detail)}</p>")
    return "\n".join(sections)


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> str:
    body = "\n".join(f'<tr><td>{one}</td><td data-label="{second}">{two}</td></tr>' for one, two in rows)
    return f"<table><thead><tr><th>{first}</th><th>{second}</th></tr></thead><tbody>\n{body}\n</tbody></table>"
