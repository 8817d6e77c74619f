"""The tortured shop with a hole in it, chosen by BREAK: a run over it has to find the hole."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

from oncekey.core.model import Code
from oncekey.torture.provider import Wanted, charge
from oncekey.torture.settings import Settings
from oncekey.torture.shop import Shop

KEY = b"idempotency-key"
settings = Settings.from_environment()
shop = Shop(settings)
once = shop.once


async def forgetful(scope: Any, receive: Any, send: Any) -> None:
    """Every try of a notification gets a key of its own, as a gateway does that makes the header anew."""
    if scope["type"] == "http" and scope["path"] == "/notifications":
        headers = [line for line in scope["headers"] if line[0] != KEY]
        scope = {**scope, "headers": [*headers, (KEY, f'"{uuid.uuid4()}"'.encode())]}
    await shop.app(scope, receive, send)


async def hopeful(scope: Any, receive: Any, send: Any) -> None:
    """What nobody knows is simply done once more."""
    if scope["type"] != "http":
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
    said = b"".join(message.get("body", b"") for message in sent)
    if Code.OUTCOME_UNKNOWN.value.encode() in said and body:
        paid = await charge(settings.provider, Wanted.of(json.loads(body)), str(uuid.uuid4()))
        said = json.dumps({"charge": paid}).encode()
        sent = [
            {"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"%d" % len(said))]},
            {"type": "http.response.body", "body": said},
        ]
    for message in sent:
        await send(message)


app = {"forgetful": forgetful, "hopeful": hopeful}[os.environ["BREAK"]]
