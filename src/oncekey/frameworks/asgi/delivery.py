"""Sends answers to the client: our own ones, and captured responses with our header lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.answers import marked_lines

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.model import Instant
    from oncekey.core.policy import Policy
    from oncekey.engine.capture import Capture
    from oncekey.frameworks.asgi.types import Send


async def send_answer(send: Send, answer: Answer) -> None:
    """Send an answer of ours. The list of headers is a copy, because outer middleware changes it in place."""
    await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def send_captured(
    send: Send, capture: Capture, policy: Policy, *, echo: bytes | None, expires_at: Instant | None
) -> None:
    """Send the application's response with our header lines, in one piece unless it was spooled."""
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
