"""The page that every refusal links to: how this API uses keys, written from its policy (R11, R230)."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from oncekey.core.answers import Answer
from oncekey.core.choices import InProgress
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import Code
from oncekey.core.problems import PROBLEMS
from oncekey.engine.enrolment import SAFE

if TYPE_CHECKING:
    from oncekey.core.policy import Policy

_SYNTAX = {
    HeaderSyntax.STRICT: 'a structured-field string in double quotes (<code>"8e03978e-…"</code>)',
    HeaderSyntax.COMPAT: "in double quotes or bare; both forms name the same key",
    HeaderSyntax.BARE: "the bare value, without quotes",
}
_FORMAT = {KeyFormat.OPAQUE: "any", KeyFormat.UUID: "a UUID,"}
_IN_FLIGHT = {
    InProgress.CONFLICT: "409 with <code>Retry-After</code>",
    InProgress.ACCEPTED: "202 with <code>Retry-After</code> and the <code>Location</code> of its status",
    InProgress.WAIT: "the first request's answer, as soon as there is one",
}
_STYLE = "body{font:16px/1.6 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}code{font-size:.9em}"


def is_served(policy: Policy) -> bool:
    """Whether the policy's link leads to this application, and not to a page that is kept elsewhere."""
    return policy.docs_url.startswith("/") and not policy.docs_url.startswith("//")


def documentation(policy: Policy) -> Answer:
    """The page."""
    body = _page(policy).encode()
    headers = (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"max-age=300"),
    )
    return Answer(200, headers, body)


def _page(policy: Policy) -> str:
    hours = f"{policy.ttl.total_seconds() / 3600:g}"
    problems = "\n".join(
        f'<h3 id="{escape(problem.slug)}">{problem.status_in(policy.flavor)} <code>{code.value}</code></h3>\n'
        f"<p>{escape(problem.detail)}</p>"
        for code, problem in PROBLEMS.items()
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Retrying requests safely</title><style>{_STYLE}</style>
<h1>Retrying requests safely</h1>
<p>Send a new random key with each new request that changes something, and the same key with every retry of it. The
request is executed once, and each repeat gets the original answer.</p>
<pre><code>{policy.key_header}: "8e03978e-40d5-43e8-bc93-6894a57f9324"</code></pre>
<ul>
<li>The key: {_FORMAT[policy.key_format]} {policy.shortest_key} to {policy.max_key_length} characters,
{_SYNTAX[policy.header_syntax]}. No personal data.</li>
<li>On {", ".join(sorted(SAFE - {"TRACE"}))} the header has no effect.</li>
<li>A repeat gets the first answer's status and body for {hours} hours, with
<code>{escape(policy.replayed_header)}: true</code>; <code>{escape(policy.expires_header)}</code> says until when.</li>
<li>A repeat while the first request runs gets {_IN_FLIGHT[policy.on_in_progress]}.</li>
<li>The same key with another request gets {PROBLEMS[Code.KEY_REUSED].status_in(policy.flavor)}, and nothing is
executed.</li>
<li>Retry with the same key after a time-out, a lost connection, 408, 409 with <code>Retry-After</code>, 429 and 5xx.
Never retry an answer that is marked as a replay: it is final.</li>
</ul>
<p>Status codes follow the {policy.flavor.value} flavour. The header is described by an IETF draft
(draft-ietf-httpapi-idempotency-key-header-07), which has expired and is no standard.</p>
<h2>Problems</h2>
{problems}
</html>
"""
