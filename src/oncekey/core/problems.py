"""The catalogue of refusals: one problem for every `Code`, and the three formats of its body.

An HTTP client receives a status and a body, and no body repeats the key, the fingerprint or any other part of the
request. An exception is raised to the caller of a protected function instead: see `core.not_run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, assert_never
from uuid import UUID

from oncekey.core.model import SECOND, Code, Refuse
from oncekey.core.policy import ErrorFormat, Flavor, Policy, micros

PROBLEM_JSON: Final = b"application/problem+json"
JSON: Final = b"application/json"
_ACCEPTED: Final = 202


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of refusal: its name in every format, and what the client should do."""

    slug: str
    status: int
    title: str
    detail: str
    fault_code: str
    stripe_type: str
    stripe_status: int | None = None
    stripe_code: str = ""
    stripe_message: str = ""
    fault_description: str = ""
    waiting_helps: bool = False
    """Whether the response has `Retry-After`."""
    retryable: bool = False
    """Whether the same request with the same key may receive another response later."""

    def status_in(self, flavor: Flavor) -> int:
        """The status in the chosen flavor."""
        if flavor is Flavor.STRIPE and self.stripe_status is not None:
            return self.stripe_status
        return self.status


@dataclass(frozen=True, slots=True)
class ProblemBody:
    """A rendered body with its media type."""

    media_type: bytes
    body: bytes


_OURS: Final = "idempotency_error"
_THEIRS: Final = "invalid_request_error"
_BROKEN: Final = "api_error"

PROBLEMS: Final[Mapping[Code, Problem]] = MappingProxyType(
    {
        Code.KEY_MISSING: Problem(
            slug="key-missing",
            status=400,
            title="Idempotency-Key is missing",
            detail="This operation needs an Idempotency-Key header: create a new random key before the first "
            "attempt and send the same key with every retry.",
            fault_code="IDEMPOTENCY_KEY_MISSING",
            stripe_type=_THEIRS,
        ),
        Code.KEY_MALFORMED: Problem(
            slug="key-malformed",
            status=400,
            title="Idempotency-Key is malformed",
            detail="The Idempotency-Key header does not contain one key in the documented form.",
            fault_code="IDEMPOTENCY_KEY_MALFORMED",
            stripe_type=_THEIRS,
        ),
        Code.BODY_INVALID: Problem(
            slug="body-invalid",
            status=400,
            title="Request body cannot be compared",
            detail="The body is ambiguous, so a retry could not be distinguished from another request.",
            fault_code="IDEMPOTENCY_BODY_INVALID",
            stripe_type=_THEIRS,
        ),
        Code.BODY_LENGTH_MISSING: Problem(
            slug="body-length-missing",
            status=411,
            title="Request body has no declared length",
            detail="The server of this API does not accept a body that is sent in chunks, so nothing was executed. "
            "Send the request again with a Content-Length and the same key.",
            fault_code="IDEMPOTENCY_BODY_LENGTH_MISSING",
            stripe_type=_THEIRS,
        ),
        Code.BODY_TOO_LARGE: Problem(
            slug="body-too-large",
            status=413,
            title="Request body is too large",
            detail="The body of a request with an Idempotency-Key is larger than this API accepts.",
            fault_code="IDEMPOTENCY_BODY_TOO_LARGE",
            stripe_type=_THEIRS,
        ),
        Code.BODY_TOO_SLOW: Problem(
            slug="body-too-slow",
            status=408,
            title="Request body did not arrive in time",
            detail="The body of the request did not arrive in time, so nothing was executed. Send the whole request "
            "again with the same key.",
            fault_code="IDEMPOTENCY_BODY_TOO_SLOW",
            stripe_type=_THEIRS,
            retryable=True,
        ),
        Code.KEY_REUSED: Problem(
            slug="key-mismatch",
            status=422,
            stripe_status=400,
            title="Idempotency-Key is already used",
            detail="This key belongs to another request, which is unchanged. Use a new key for a new "
            "request, and send a retry exactly as it was first sent.",
            fault_code="IDEMPOTENCY_CONFLICT",
            # The published wording of the fault envelope is part of its contract.
            fault_description="An Idempotency-Key may not be reused with a different request body.",
            stripe_type=_OURS,
            # The wording of Stripe's API, without the key that Stripe repeats in it.
            stripe_message="Keys for idempotent requests can only be used with the same parameters they were first "
            "used with. Try using another key if you meant to execute a different request.",
        ),
        Code.IN_PROGRESS: Problem(
            slug="in-progress",
            status=409,
            title="A request is outstanding for this Idempotency-Key",
            detail="The first request with this key is still being processed. Wait for as long as "
            "Retry-After says, then retry with the same key.",
            fault_code="IDEMPOTENCY_KEY_IN_PROGRESS",
            stripe_type=_OURS,
            stripe_code="idempotency_key_in_use",
            stripe_message="There is currently another in-progress request using this Idempotent Key (that probably "
            "means you submitted twice, and the other request is still going through). Please try again later.",
            waiting_helps=True,
            retryable=True,
        ),
        Code.OUTCOME_UNKNOWN: Problem(
            slug="outcome-unknown",
            status=409,
            title="The outcome for this Idempotency-Key is not known yet",
            detail="The operation may have been executed; its outcome is being resolved, and until then it is not run "
            "again. Retry with the same key, and do not use a new one.",
            fault_code="IDEMPOTENCY_OUTCOME_UNKNOWN",
            stripe_type=_OURS,
            waiting_helps=True,
            retryable=True,
        ),
        Code.RESPONSE_NOT_STORED: Problem(
            slug="response-not-stored",
            status=409,
            title="The operation is done, but its response was not stored",
            detail="The operation was executed once, and its response was too large to store. Read the "
            "result where Location points; a retry receives this response again.",
            fault_code="IDEMPOTENCY_RESPONSE_NOT_STORED",
            stripe_type=_OURS,
        ),
        Code.KEY_EXPIRED: Problem(
            slug="key-expired",
            status=410,
            title="Idempotency-Key has expired",
            detail="This key was used too long ago. Find out whether the operation was executed before it is "
            "sent with a new key.",
            fault_code="IDEMPOTENCY_KEY_EXPIRED",
            stripe_type=_OURS,
        ),
        Code.KEY_NOT_FOUND: Problem(
            slug="key-not-found",
            status=404,
            title="Idempotency-Key is not known",
            detail="There is no request with this key.",
            fault_code="IDEMPOTENCY_KEY_NOT_FOUND",
            stripe_type=_THEIRS,
        ),
        Code.STORE_UNAVAILABLE: Problem(
            slug="store-unavailable",
            status=503,
            title="Idempotency cannot be guaranteed right now",
            detail="The request was not accepted, because a duplicate of it could not be recognised. Retry "
            "with the same key.",
            fault_code="IDEMPOTENCY_STORE_UNAVAILABLE",
            stripe_type=_BROKEN,
            waiting_helps=True,
            retryable=True,
        ),
        Code.RECORD_UNREADABLE: Problem(
            slug="record-unreadable",
            status=500,
            title="The key's record cannot be read",
            detail="This key was used before, and the server cannot read the outcome of that request. Nothing was "
            "executed now. Do not send the operation with a new key until its operators know the outcome.",
            fault_code="IDEMPOTENCY_RECORD_UNREADABLE",
            stripe_type=_BROKEN,
        ),
        Code.EXECUTION_FAILED: Problem(
            slug="execution-failed",
            status=500,
            title="The operation failed",
            detail="The server could not finish the operation. A retry must use the same key.",
            fault_code="IDEMPOTENCY_EXECUTION_FAILED",
            stripe_type=_BROKEN,
            retryable=True,
        ),
        Code.TIMED_OUT: Problem(
            slug="timed-out",
            status=408,
            title="The operation did not begin in time",
            detail="The request was accepted, but no worker began it before it expired. Nothing was executed, "
            "and nothing will be. Send it again with a new key.",
            fault_code="IDEMPOTENCY_REQUEST_TIMED_OUT",
            stripe_type=_OURS,
        ),
        Code.RATE_LIMITED: Problem(
            slug="rate-limited",
            status=429,
            title="Too many new keys or look-ups",
            detail="The request was not executed, because too many keys are used at once. Wait for as long as "
            "Retry-After says, then retry with the same key; known keys still receive their responses.",
            fault_code="IDEMPOTENCY_RATE_LIMITED",
            stripe_type=_THEIRS,
            stripe_code="rate_limit",
            waiting_helps=True,
            retryable=True,
        ),
        Code.REQUEST_TOO_OLD: Problem(
            slug="request-too-old",
            status=412,
            title="The request was first sent too long ago",
            detail="Its key may have been used and forgotten since, so the request was not executed. Find out whether "
            "the operation was executed before it is sent with a new key.",
            fault_code="IDEMPOTENCY_REQUEST_TOO_OLD",
            stripe_type=_THEIRS,
        ),
    }
)
"""The problem for each code; a test checks that none is missing."""


def wait_of(refusal: Refuse, policy: Policy) -> int:
    """Whole seconds after which the client may receive another response."""
    if refusal.retry_after is not None:
        return max(1, refusal.retry_after)
    # Before the reconciler's next query to the provider, the response cannot change.
    return -(-micros(policy.reconcile_interval) // SECOND) if refusal.code is Code.OUTCOME_UNKNOWN else 1


def type_of(code: Code, policy: Policy) -> str:
    """The URI that identifies this kind of problem (RFC 9457, 3.1.1)."""
    return f"{policy.problem_types}{PROBLEMS[code].slug}"


def documentation_of(code: Code, policy: Policy) -> str:
    """The URL of the documentation of this kind of problem."""
    return f"{policy.docs_url}#{PROBLEMS[code].slug}"


def render(
    code: Code,
    status: int,
    policy: Policy,
    *,
    detail: str = "",
    final: bool = False,
    fault_id: str = "",
    trace_id: str = "",
) -> ProblemBody:
    """The body of a refusal in the format of the policy. `final`: it is stored, and every retry receives it."""
    detail_text = detail or PROBLEMS[code].detail
    match policy.error_format:
        case ErrorFormat.CODE:
            return _page(JSON, {"code": code.value})
        # Waiting is not an error: a 202 is neither a fault nor a problem, whatever the format of errors.
        case ErrorFormat.PROBLEM | ErrorFormat.FAULT if status == _ACCEPTED:
            return _page(JSON, _members(code, status, policy, detail_text, "", final=final))
        case ErrorFormat.PROBLEM:
            return _page(PROBLEM_JSON, _members(code, status, policy, detail_text, fault_id, final=final))
        case ErrorFormat.FAULT:
            return _page(JSON, _fault(code, detail_text, fault_id, trace_id))
        case _:
            assert_never(policy.error_format)


def _members(
    code: Code, status: int, policy: Policy, detail_text: str, fault_id: str, *, final: bool
) -> dict[str, object]:
    problem = PROBLEMS[code]
    # The id of this occurrence: a client quotes it, and the log line has the same id.
    occurrence = {"instance": UUID(fault_id).urn} if fault_id else {}
    members: dict[str, object] = {
        "type": type_of(code, policy),
        "title": problem.title,
        "status": status,
        "detail": detail_text,
        **occurrence,
        "retryable": problem.retryable and not final,
        "code": code.value,
    }
    if policy.flavor is Flavor.STRIPE:
        # An extension member where clients of that flavor look for the type of the error.
        members["error"] = {
            "type": problem.stripe_type,
            "code": problem.stripe_code or code.value,
            "message": problem.stripe_message or detail_text,
        }
    return members


def _fault(code: Code, detail_text: str, fault_id: str, trace_id: str) -> dict[str, object]:
    problem = PROBLEMS[code]
    error = {"errorCode": problem.fault_code, "description": problem.fault_description or detail_text}
    return {"fault": {"faultId": fault_id, "traceId": trace_id, "errors": [error]}}


def _page(media_type: bytes, members: Mapping[str, object]) -> ProblemBody:
    return ProblemBody(media_type, json.dumps(members, separators=(",", ":")).encode("ascii"))
