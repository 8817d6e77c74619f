"""Answers on their way out: refusals with their instance, replays, and captured responses with our marks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from uuid import uuid4

from oncekey.core import answers
from oncekey.core.answers import marked_lines
from oncekey.core.keys import key_digest
from oncekey.core.model import Code

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.model import Claim, Instant, Refuse, Replay
    from oncekey.core.policy import Policy
    from oncekey.frameworks.asgi.capture import Capture
    from oncekey.frameworks.asgi.types import Send


log = logging.getLogger("oncekey")
security = logging.getLogger("oncekey.security")
"""Gets a warning for each misused key: a client has a bug, or an attacker tries a known key with another payload."""


def refusal(
    refused: Refuse,
    policy: Policy,
    *,
    claim: Claim | None = None,
    echo: bytes | None = None,
    status_url: str | None = None,
) -> Answer:
    """The answer to a request that is not executed; its instance stands in the answer and in the log."""
    instance = uuid4()
    log.info("oncekey: refused with %s (instance %s)", refused.code.value, instance)
    if refused.code is Code.KEY_REUSED and claim is not None:
        known = fields_of("key_misuse", claim, instance=str(instance))
        security.warning(
            "oncekey: a key was used for another request of %(operation)s in %(scope)s (digest %(key_digest)s, "
            "instance %(instance)s)",
            known,
            extra={"oncekey": known},
        )
    return answers.refuse(refused, policy, echo=echo, status_url=status_url, fault_id=instance.hex)


def replayed(verdict: Replay, policy: Policy, *, echo: bytes | None, status_url: str | None) -> Answer:
    """The stored answer; only the problem that stands for one that was not kept needs an instance."""
    stored = verdict.record.response
    kept = stored is not None and stored.body is not None
    fault_id = "" if kept else uuid4().hex
    return answers.replay(verdict, policy, echo=echo, status_url=status_url, fault_id=fault_id)


def fields_of(event: str, claim: Claim, **more: str) -> dict[str, str]:
    """What a log line about a request has as fields: no key, only its digest."""
    known = {"operation": claim.operation, "scope": claim.id.scope, "key_digest": key_digest(claim.id.key)}
    return {"event": event, **known, **more}


async def send_answer(send: Send, answer: Answer) -> None:
    """Send an answer of ours. The list is fresh: outer middleware changes it in place."""
    await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def send_captured(
    send: Send, capture: Capture, policy: Policy, *, echo: bytes | None, expires_at: Instant
) -> None:
    """Send what the application answered, as it was and with our marks, in one piece unless it was spooled."""
    headers = marked_lines(capture.headers, policy, echo=echo, expires_at=expires_at)
    await send({"type": "http.response.start", "status": capture.status, "headers": headers})
    whole = capture.kept
    if whole is not None:
        await send({"type": "http.response.body", "body": whole, "more_body": False})
        return
    pieces = iter(capture.pieces())
    piece = next(pieces, b"")
    for following in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        piece = following
    await send({"type": "http.response.body", "body": piece, "more_body": False})
