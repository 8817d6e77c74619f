"""Webhooks: the provider tells of each charge on its own, signed, a few times if nobody takes it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
import uuid
from typing import TYPE_CHECKING, Final

from oncekey.demo.outbound import AnswerLostError, NothingSentError, ask, http_url

if TYPE_CHECKING:
    from oncekey.demo.provider.ledger import Charge

SIGNATURE: Final = "Oncekey-Signature"
TRIES: Final = 6
_FIRST_PAUSE: Final = 0.2
_PATIENCE: Final = 10.0
_AT_ONCE: Final = 16

log = logging.getLogger("oncekey.provider")


def sign(body: bytes, secret: str, at: int) -> str:
    """The signature's header: the time, and a keyed hash of the time and the body."""
    digest = hmac.new(secret.encode(), b"%d.%b" % (at, body), hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class Webhooks:
    """Sends beside the requests, so that nobody waits for it."""

    def __init__(self, url: str | None, secret: str) -> None:
        self._secret = secret
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._sending: set[asyncio.Task[None]] = set()
        self.url: str | None = None
        self.switch(url)

    def switch(self, url: str | None) -> None:
        """Send to another address from now on, or nowhere."""
        if url is not None:
            http_url(url)
        self.url = url

    def tell(self, charge: Charge) -> None:
        """Send word of a charge, later."""
        if self.url is None:
            return
        event = {"id": f"evt_{uuid.uuid4().hex}", "type": "charge.succeeded", "charge": charge.shown()}
        task = asyncio.get_running_loop().create_task(self._deliver(json.dumps(event).encode()))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def stop(self) -> None:
        """Drop what was not delivered: a provider that ends is one that ends."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _deliver(self, body: bytes) -> None:
        async with self._slots:
            for number in range(TRIES):
                if number:
                    await asyncio.sleep(_FIRST_PAUSE * 2 ** (number - 1))
                if self.url is None or await self._taken(self.url, body):
                    return
        log.warning("oncekey provider: a webhook was not taken after %d tries", TRIES)

    async def _taken(self, url: str, body: bytes) -> bool:
        # Signed anew each time: a receiver refuses a signature that has become old.
        headers = {"Content-Type": "application/json", SIGNATURE: sign(body, self._secret, int(time.time()))}
        try:
            reply = await ask("POST", url, content=body, headers=headers, patience=_PATIENCE)
        except (NothingSentError, AnswerLostError):
            return False
        return reply.ok
