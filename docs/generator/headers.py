"""`headers.md`: the header fields that oncekey reads and writes, named as the code names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oncekey.core.answers import LONGEST_WAIT
from oncekey.core.first_sent import FIRST_SENT
from oncekey.core.headers import ALWAYS_KEPT, KEY_HEADER, NEVER_KEPT
from oncekey.core.policy import Policy

from .markdown import code, table, title
from .markdown import page as put_together

_DEFAULT: Final = Policy()

RESPONSE: Final[Mapping[str, tuple[str, str]]] = {
    KEY_HEADER: (
        (
            "first responses, replays and refusals, if the request sent the field once; not on a response that the "
            "application sent before the handler was called, such as its own 401 or 422"
        ),
        "The field as it was received, so that a client can match the response to its request.",
    ),
    _DEFAULT.expires_header: (
        "first responses and replays",
        "The time until which a retry receives this response, as an HTTP date by the store's clock.",
    ),
    _DEFAULT.replayed_header: (
        "replays",
        "`true`: the response was stored by an earlier request. No other value is ever sent.",
    ),
    "Retry-After": (
        "409 and 202 in progress, accepted OUTBOX requests, unknown outcomes, 503; status of unfinished requests",
        (
            "Whole seconds, at least 1. In progress: as long as the operation has been running, at most the rest of "
            f"the lease and at most {LONGEST_WAIT}."
        ),
    ),
    "Location": (
        "202 in progress, accepted OUTBOX requests, unknown outcomes, responses that were not stored",
        "The status resource of the key; for a response that was not stored, its own `Location` if it had one.",
    ),
    "Link": (
        "every refusal",
        '`rel="describedby"`: the help page about this API\'s keys, at the section of the problem.',
    ),
    "Content-Type": ("every refusal", "`application/problem+json` or `application/json`."),
    "Content-Length": ("every refusal and replay", "The length of the body."),
    "Content-Language": ("every refusal", "`en`."),
    "Cache-Control": (
        "refusals; replays whose stored response has none",
        "`no-store`.",
    ),
}
"""The fields that oncekey adds to responses. A test compares it with real responses."""

_KEY_RULES: Final = (
    ("spelling", '`Idempotency-Key: "8e03978e-40d5-43e8-bc93-6894a57f9324"`, or the same without quotes'),
    ("quoted", 'a String of RFC 9651: printable ASCII, only `\\"` and `\\\\` escaped; parameters are ignored'),
    ("bare", "letters, digits and `. _ ~ : / + = @ -`, the first one neither `:` nor `@`"),
    ("length", "16 to 255 characters after unquoting"),
    ("comparison", "byte for byte, case-sensitive"),
    ("sent twice, or as a list", "400, nothing is executed"),
    ("cannot be parsed, or empty", "400, even if the key is optional: never treated as absent"),
)


def page() -> str:
    """The page."""
    never = sorted(name.decode("ascii") for name in NEVER_KEPT)
    stored = sorted(name.decode("ascii") for name in ALWAYS_KEPT)
    added = [name for name in _DEFAULT.replay_headers if name not in stored]
    return put_together(
        title("Headers"),
        "Names of header fields are case-insensitive. This page shows the defaults; [settings](settings.md) change "
        "them.",
        "## Request",
        f"### {KEY_HEADER}",
        "It takes effect on protected routes, except with `GET`, `HEAD` and `OPTIONS`; a route that is protected by "
        "path may name any method. Elsewhere it has no effect.",
        table(("Property", "Rule"), _KEY_RULES),
        "The client creates the key before the first attempt: a new random UUID (version 4 or 7) for each new request, "
        "and the same one for every retry. A key must not contain personal data. oncekey never creates a key for a "
        "client.",
        "### Other fields",
        table(
            ("Field", "Effect"),
            [
                (
                    "`Content-Type`",
                    "Selects how the body is compared; part of the [fingerprint](../explanation/fingerprint.md).",
                ),
                (
                    f"`{FIRST_SENT}`",
                    (
                        "The time of the client's first attempt, as an HTTP date or in RFC 3339. It takes effect if "
                        "`max_request_age` is set."
                    ),
                ),
                ("`traceparent`", "Its trace ID is `traceId` in a refusal with `error_format=fault`."),
                ("`Authorization`", "Yours. With `bind_to=token` its digest is part of the scope of the key."),
            ],
        ),
        "## Response",
        "oncekey adds these fields; everything else in a first response comes from the handler.",
        table(("Field", "Sent with", "Value"), [(f"`{name}`", on, says) for name, (on, says) in RESPONSE.items()]),
        "## Stored and replayed",
        f"Always: {code(*stored)}. By default also: {code(*added)} (`replay_headers`). Repeated fields are stored in "
        f"their order. Other fields are not stored; middleware outside of oncekey adds its own to replays, as to every "
        f"response.",
        "### Never stored",
        f"{code(*never)}, and the fields that the response's `Connection` header lists.",
    )
