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
        "The field as it was received, so that a client can tell which request is meant.",
    ),
    _DEFAULT.expires_header: (
        "first answers and replays of a stored answer",
        "Until when a retry gets this answer, as an HTTP date by the store's clock.",
    ),
    _DEFAULT.replayed_header: (
        "replays",
        "`true`: this answer was stored by an earlier request. It is never sent with another value.",
    ),
    "Retry-After": (
        "409 and 202 in progress, accepted OUTBOX requests, unknown outcomes, 503; the status resource until the end",
        (
            "Whole seconds, at least 1. In progress: as long as the operation has been running, at most the rest of "
            f"the lease and at most {LONGEST_WAIT}."
        ),
    ),
    "Location": (
        "202 in progress, accepted OUTBOX requests, unknown outcomes, answers that were not kept",
        "The status resource of the key; for an answer that was not kept, its own `Location` if it had one.",
    ),
    "Link": (
        "every refusal",
        '`rel="describedby"`: the page about this API\'s keys, at the problem in question.',
    ),
    "Content-Type": ("every refusal", "`application/problem+json` or `application/json`."),
    "Content-Length": ("every refusal and replay", "The length of the body."),
    "Content-Language": ("every refusal", "`en`."),
    "Cache-Control": (
        "refusals; replays whose stored answer has none",
        "`no-store`.",
    ),
}
"""What oncekey itself adds to answers. A test compares it with what answers really have."""

_KEY_RULES: Final = (
    ("spelling", '`Idempotency-Key: "8e03978e-40d5-43e8-bc93-6894a57f9324"`, or the same without quotes'),
    ("quoted", 'a String of RFC 9651: printable ASCII, only `\\"` and `\\\\` escaped; parameters are ignored'),
    ("bare", "letters, digits and `. _ ~ : / + = @ -`, the first one neither `:` nor `@`"),
    ("length", "16 to 255 characters after unquoting"),
    ("compared", "byte for byte, case counts"),
    ("sent twice, or as a list", "400, nothing is executed"),
    ("cannot be parsed, or empty", "400, also where the key is optional: never as if it were absent"),
)


def page() -> str:
    """The page."""
    never = sorted(name.decode("ascii") for name in NEVER_KEPT)
    stored = sorted(name.decode("ascii") for name in ALWAYS_KEPT)
    added = [name for name in _DEFAULT.replay_headers if name not in stored]
    return put_together(
        title("Headers"),
        "Names of header fields are not case-sensitive. This page shows the defaults; [settings](settings.md) change "
        "them.",
        "## Request",
        f"### {KEY_HEADER}",
        "Counts on enrolled routes, whatever method they are served by. On `GET`, `HEAD` and `OPTIONS`, and on routes "
        "that are not enrolled, it has no effect.",
        table(("What", "Rule"), _KEY_RULES),
        "The client makes the key, before the first try: a new random UUID (version 4 or 7) for each new request, and "
        "the same one with every retry of it. No personal data. oncekey never makes a key for a client.",
        "### Other fields",
        table(
            ("Field", "What it does"),
            [
                (
                    "`Content-Type`",
                    "Says how the body is [fingerprinted](../explanation/fingerprint.md), and is part of it.",
                ),
                (
                    f"`{FIRST_SENT}`",
                    (
                        "When the client sent the request first, as an HTTP date or by RFC 3339. It counts where "
                        "`max_request_age` is set."
                    ),
                ),
                ("`traceparent`", "Its trace id is `traceId` in a refusal of `error_format=fault`."),
                ("`Authorization`", "Yours. With `bind_to=token` its digest is part of whose key it is."),
            ],
        ),
        "## Response",
        "What oncekey adds; everything else in a first answer is the handler's.",
        table(("Field", "On", "What it says"), [(f"`{name}`", on, says) for name, (on, says) in RESPONSE.items()]),
        "## Stored and replayed",
        f"Always: {code(*stored)}. By default also: {code(*added)} (`replay_headers`). Repeated fields are kept, in "
        "their order. Other fields are not stored; middleware outside of oncekey adds its own to replays as to every "
        "answer.",
        "### Never stored",
        f"{code(*never)}, and whatever the response's `Connection` names.",
    )
