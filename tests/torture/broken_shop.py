"""The tortured shop with a hole in it: what is in progress or unknown is done once more. A run has to find it."""

from __future__ import annotations

import json
import uuid
from typing import Any

from oncekey_demo.torture.plan import Settings
from oncekey_demo.torture.shop import Shop, Wanted, charge

settings = Settings.from_environment()
shop = Shop(settings)
once = shop.once


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The shop, whose 409 nobody gets to see."""
    if scope["type"] != "http" or scope["path"] in {"/orders", "/bookings"}:
        await shop.app(scope, receive, send)
        return
    body, sent = b"", []

    async def read() -> Any:
        nonlocal body
        message = await receive()
        body += message.get("body", b"")
        return message

    async def keep(message: Any) -> None:
        sent.append(message)

    await shop.app(scope, read, keep)
    if body and any(message.get("status") == 409 for message in sent):
        paid = await charge(settings.provider, Wanted.of(json.loads(body)), key=str(uuid.uuid4()))
        said = json.dumps({"charge": paid}).encode()
        sent = [
            {"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"%d" % len(said))]},
            {"type": "http.response.body", "body": said},
        ]
    for message in sent:
        await send(message)
