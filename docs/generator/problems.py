"""`problems.md`: the statuses and texts are from the catalogue, and what a client does from this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from oncekey.core.model import Code
from oncekey.core.policy import ErrorFormat, Flavor, Policy
from oncekey.core.problems import PROBLEMS, render, type_of

from .markdown import page as put_together
from .markdown import table, title


class Advice(NamedTuple):
    """What happened on the server, and what the client should do."""

    happened: str
    client: str


ADVICE: Final[Mapping[Code, Advice]] = {
    Code.KEY_MISSING: Advice(
        "Nothing was executed and nothing stored. The route requires a key.",
        "This is a mistake in the client: create a key before the first attempt and send it.",
    ),
    Code.KEY_MALFORMED: Advice(
        "Nothing was executed and nothing stored. The header is empty, sent twice, too short, too long, or not in the "
        "[format that the API accepts](headers.md#idempotency-key); `detail` names the reason.",
        "This is a mistake in the client: correct the key.",
    ),
    Code.BODY_INVALID: Advice(
        "Nothing was executed and nothing stored. The body is declared as JSON and is [invalid or "
        "ambiguous](../explanation/fingerprint.md#rejected-json): a duplicate name, a number beyond a double, broken "
        "UTF-8, or too deep.",
        "This is a mistake in the client: correct the body. The key was not used and may be sent with the corrected "
        "body.",
    ),
    Code.BODY_LENGTH_MISSING: Advice(
        "Nothing was executed and nothing stored. The body was sent in chunks (`Transfer-Encoding: chunked`), and the "
        "API runs on a WSGI server that does not mark the end of such a body, or on Django under WSGI, which reads it "
        "as empty: all such bodies would have the same fingerprint.",
        "Send the same bytes with a `Content-Length`. The key was not used.",
    ),
    Code.BODY_TOO_LARGE: Advice(
        "Nothing was executed and nothing stored. The body is larger than `max_request_bytes`.",
        "Do not retry: send less.",
    ),
    Code.BODY_TOO_SLOW: Advice(
        "Nothing was executed and nothing stored. The body did not arrive within `body_timeout`.",
        "Send the whole request again with the same key.",
    ),
    Code.KEY_REUSED: Advice(
        "Nothing was executed. The key belongs to a request with another method, path, query or body; that request and "
        "its response are unchanged. The code is sent in every state except expired.",
        "Never retry. Either the body changed between attempts, or one key was used for two requests: both are "
        "mistakes in the client.",
    ),
    Code.IN_PROGRESS: Advice(
        "The request with this key is not finished: the first one still runs, or a worker resumes it. A "
        "duplicate executed nothing. The first request of a PHASED route receives this response if the server stops "
        "while the handler runs: its finished steps are stored. With `on_in_progress=accepted` the status is 202 and "
        "`Location` is the status resource. An OUTBOX route sends 202 only after its commit, with the handler's own "
        "body.",
        "Wait for `Retry-After`, then send the same request with the same key.",
    ),
    Code.OUTCOME_UNKNOWN: Advice(
        "The operation may have been executed: the process died or a reply was lost after a call to a provider could "
        "have been made, or an INLINE handler returned 401, 403, 408, 425 or 429, which does not prove "
        "that nothing was executed. The first request or a retry receives this response, and no retry runs the "
        "handler. "
        "A PHASED route sends it instead of 502 or 504 when the reply of a call that may not be repeated is lost. "
        "`on_unknown` makes the status 202 or 503; after a settlement that could not be written it is 503.",
        "Retry later with the same key, or read the status resource in `Location`. Do not send it with a "
        "new key: that would run it again.",
    ),
    Code.RESPONSE_NOT_STORED: Advice(
        "The first request was executed, and its response was larger than `max_response_bytes`. The refusal has "
        "`Idempotent-Replayed: true`.",
        "Do not retry: the request is done. Read the result from `Location`.",
    ),
    Code.KEY_EXPIRED: Advice(
        "This request was not executed. Sent only with `on_expired=gone`: the key was used, and its `ttl` has passed.",
        "Check whether the operation was executed; if not, send it with a new key.",
    ),
    Code.KEY_NOT_FOUND: Advice(
        "Sent only by the status resource. The key was never used, has expired, or belongs to another caller; the "
        "response does not reveal which.",
        "Send the request, if it was never sent.",
    ),
    Code.STORE_UNAVAILABLE: Advice(
        "This request had no effect: the store was not available before the handler ran, or the handler's transaction "
        "was rolled back.",
        "Retry with the same key after `Retry-After`.",
    ),
    Code.RECORD_UNREADABLE: Advice(
        "This request was not executed, even with `on_store_error=fail_open`. The record of an earlier request was "
        "written by another version of oncekey, or is damaged. The log names it by the digest of its key. The record "
        "is kept, and [reaped when it expires](../howto/operators.md#records-that-cannot-be-read).",
        "Do not retry, and do not send it with a new key: the server's operators have to repair the record first.",
    ),
    Code.EXECUTION_FAILED: Advice(
        "The handler failed and its own response could not be sent: it raised `NotExecutedError`, its response could "
        "not be captured, it raised under `on_5xx=store`, or it returned a success whose [rows were rolled "
        "back](../explanation/crashes.md#local). PHASED: the reply to a call was lost, and the call [may be "
        "repeated](../howto/phased.md#repeatable-calls): a retry or a worker finishes the request. OUTBOX: an operator "
        "[discarded the deferred call](../howto/operators.md#dead-letters).",
        "If `retryable` is true, retry with the same key. If it is false, the failure is the stored response: every "
        "retry receives it, marked as a replay. For another attempt send the request with a new key.",
    ),
    Code.TIMED_OUT: Advice(
        "OUTBOX: the request was accepted, and no worker began its call before it expired. Nothing was executed, and "
        "nothing will be. This is the final response of the key, and is replayed for 24 hours.",
        "Send it again with a new key.",
    ),
    Code.RATE_LIMITED: Advice(
        "The tenant sent more new keys than `max_new_keys_per_second` or has more than `max_live_keys`, or the caller "
        "requested the status more often than `max_lookups_per_second`. Nothing was executed and nothing stored.",
        "Retry with the same key after `Retry-After`. Keys that have a record are not limited.",
    ),
    Code.REQUEST_TOO_OLD: Advice(
        "`Idempotency-First-Sent` is older than `max_request_age` or unreadable, and the key has no record any more. "
        "Nothing was executed and nothing stored.",
        "Check whether the operation was executed; if not, send it with a new key.",
    ),
}
"""A test fails when a code is missing here."""

MATRIX: Final = (
    ("no response: time-out, connection lost", "yes", "same", "back off, with jitter"),
    ("2xx, 3xx", "no: done", "", ""),
    ("202 with `Retry-After`", "yes", "same", "`Retry-After`, or follow `Location`"),
    ("400, 404, 413, 422 and other 4xx", "no: correct the request", "new", ""),
    ("401, 403", "after signing in: no response is stored under the key", "same", ""),
    ("408, 425, 429", "yes: no response is stored under the key", "same", "`Retry-After`, else back off"),
    ("409 `idempotency_key_in_progress`", "yes", "same", "`Retry-After`"),
    ("409 `idempotency_outcome_unknown`", "yes, slowly", "same", "`Retry-After`"),
    ("other 409", "no", "new, for a new request", ""),
    ("422 or 400 `idempotency_key_reused_with_different_payload`", "never: a mistake in the client", "", ""),
    ("500, 502, 503, 504", "yes", "same", "`Retry-After`, else back off"),
    ("any response with `Idempotent-Replayed: true`", "never: it is final", "", ""),
)


def page() -> str:
    """The page."""
    policy = Policy()
    overview = [
        (
            f"[`{code.value}`](#{code.value})",
            str(problem.status_in(Flavor.IETF)),
            str(problem.status_in(Flavor.STRIPE)),
            "yes" if problem.waiting_helps else "",
            problem.title,
        )
        for code, problem in PROBLEMS.items()
    ]
    return put_together(
        title("Problems"),
        "A problem response means that oncekey refused a request instead of running its handler. Each has a `code` "
        'that never changes, a `Link` with `rel="describedby"`, and `Cache-Control: no-store`. No body repeats the key '
        "or anything else of the request.",
        table(("Code", "Status", "`flavor=stripe`", "`Retry-After`", "Title"), overview),
        "The texts follow draft-ietf-httpapi-idempotency-key-header-07 where it has them; the draft "
        "[has expired and is not a standard](../explanation/limits.md#the-header-is-not-a-standard).",
        *(_section(code, policy) for code in PROBLEMS),
        "## What a client does",
        table(("Response", "Retry?", "Key", "Wait"), MATRIX),
        "Stop before the key expires (`Idempotency-Key-Expires`). After that, check the outcome instead of sending "
        "again.",
        "401, 403, 408, 425 and 429 are never stored, and a retry with the same key runs the handler or resumes it. If "
        "an INLINE handler returns one of them, the status does not prove that nothing was executed: the client "
        "receives `idempotency_outcome_unknown` instead, unless the handler raised `NotExecutedError` or the route "
        "lists the status in `not_executed_statuses`.",
        "## Error formats",
        "`error_format` selects the format of the body. This is the response for a key that was used for another "
        "request:",
        *(_shape(form) for form in ErrorFormat),
        'With `flavor="stripe"`, `problem` bodies have one more member, `error`:',
        _example(Policy(flavor=Flavor.STRIPE)),
        "A 202 is not an error, in any format. With `on_in_progress=accepted` it is `application/json` with the "
        "members of a problem. On an OUTBOX route it is [the handler's own body](../howto/outbox.md#the-202).",
    )


def _section(code: Code, policy: Policy) -> str:
    problem, advice = PROBLEMS[code], ADVICE[code]
    statuses = f"{problem.status_in(Flavor.IETF)}"
    if problem.status_in(Flavor.STRIPE) != problem.status_in(Flavor.IETF):
        statuses += f" ({problem.status_in(Flavor.STRIPE)} with `flavor=stripe`)"
    return put_together(
        f"## {code.value}",
        table(
            ("Status", "`type`", "`fault` code", "`error.type` of stripe"),
            [
                (
                    statuses,
                    f"`{type_of(code, policy)}`",
                    f"`{problem.fault_code}`",
                    f"`{problem.stripe_type}`",
                )
            ],
        ),
        f"> {problem.detail}",
        f"**What happened.** {advice.happened}",
        f"**What to do.** {advice.client}",
    ).strip()


def _shape(form: ErrorFormat) -> str:
    return f'`error_format="{form.value}"`:\n\n{_example(Policy(error_format=form))}'


_TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"


def _example(policy: Policy) -> str:
    code = Code.KEY_REUSED
    shown = render(
        code,
        PROBLEMS[code].status_in(policy.flavor),
        policy,
        fault_id="5f0c2b7e9a614d3f8c1e0a9b7d6e5f40",
        trace_id=_TRACE,
    )
    return f"```http\nContent-Type: {shown.media_type.decode()}\n\n{shown.body.decode()}\n```"
