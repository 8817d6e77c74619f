"""Sends traffic to the running demo: real requests over HTTP, with faults of its provider.

Afterwards the console shows requests of every outcome: executed, replayed, refused, declined, resumed by a worker,
unknown, and a dead letter. The seed decides which requests are sent; their timing decides the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

from oncekey_demo.charging import AnswerLostError, NothingSentError, ask
from oncekey_demo.routes import NO_MAILBOX

PER_SECOND: Final = 8
"""New keys per second; a key is sent up to three times."""
AT_ONCE: Final = 16
"""Keys in progress at the same time: a slower demo gets fewer requests."""
EVERY: Final = 5
"""Seconds between two reports of the progress."""
_TENANTS: Final = ("demo-alpha", "demo-alpha", "demo-beta")
_PRODUCTS: Final = ("sku_teapot", "sku_cup", "sku_kettle", "sku_tray")

Progress = Callable[[int, int, Counter[str]], None]
"""Called with the elapsed seconds, the total seconds, and the responses by status."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How much to send."""

    seconds: int
    seed: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: its path, its relative frequency, and its faults."""

    path: str
    share: int = 1
    faults: Mapping[str, str] = field(default_factory=dict)
    """Headers of the first attempt."""
    times: int = 1
    """The number of attempts, one after the other."""
    together: int = 1
    """The number of copies of each attempt that are sent at the same moment."""
    other_body: bool = False
    """Whether the last attempt has the same key but another body."""
    customer: str | None = None


def _fault(name: str, *, repeatable: bool = True) -> dict[str, str]:
    return {"X-Demo-Fault": name, **({} if repeatable else {"X-Demo-Repeatable": "off"})}


KINDS: Final = (
    Kind("/orders", share=6),
    Kind("/orders", share=2, times=2),  # the second attempt gets the stored response
    Kind("/orders", faults={"X-Demo-Delay": "0.5"}, together=3),  # 409 while the first one runs
    Kind("/orders", times=2, other_body=True),  # 422
    Kind("/payments", share=4),
    Kind("/payments", share=2, faults=_fault("drop-after"), times=2),  # 500, then 201 with one charge
    Kind("/payments", faults=_fault("error-before")),  # the client leaves, and the completer resumes the request
    Kind("/payments", faults=_fault("decline"), times=2),  # 402, then the stored 402
    Kind("/payments", faults=_fault("drop-before", repeatable=False), times=2),  # unknown: nothing was charged
    Kind("/payments", customer=NO_MAILBOX),  # its receipt becomes a dead letter
    Kind("/transfers", share=3, times=2),  # 202, then the response of the worker's call
    Kind("/transfers", faults=_fault("decline")),
    Kind("/transfers", faults=_fault("drop-after", repeatable=False)),  # unknown until the webhook arrives
    Kind("/notifications", share=2),
    Kind("/notifications", faults=_fault("drop-after")),  # unknown until the webhook arrives
    Kind("/notifications", faults=_fault("error-before")),  # unknown: nothing was charged
)


@dataclass(frozen=True, slots=True)
class Send:
    """The drawn requests for one key."""

    kind: Kind
    key: str
    tenant: str
    bodies: tuple[bytes, ...]
    """One for each attempt."""
    pause: float
    """Seconds between two attempts."""


def drawn(seed: int, number: int, chance: Random) -> Send:
    """Draw the requests for the key with this number. The first keys cover each kind, so a short run has all kinds."""
    kind = KINDS[number] if number < len(KINDS) else chance.choices(KINDS, [one.share for one in KINDS])[0]
    customer = kind.customer or f"cus_{chance.randrange(1000, 1040)}"
    wanted: dict[str, object] = {"customer_id": customer}
    if kind.path == "/orders":
        wanted["items"] = [{"product_id": chance.choice(_PRODUCTS), "quantity": chance.randint(1, 5)}]
    else:
        wanted |= {"amount_cents": chance.randrange(499, 20_000, 50), "currency": "EUR"}
    bodies = [wanted] * kind.times
    if kind.other_body:
        bodies[-1] = {**wanted, "customer_id": f"{customer}-other"}
    return Send(
        kind,
        f"traffic-{seed}-{number:06}",
        chance.choice(_TENANTS),
        tuple(json.dumps(body).encode() for body in bodies),
        chance.uniform(0.5, 1.5),
    )


async def send(url: str, traffic: Traffic, is_over: Callable[[], bool]) -> None:
    """Send the traffic to the demo at this URL: at least one request of each kind, unless `is_over` ends it before."""
    chance, seconds = Random(traffic.seed), traffic.seconds  # noqa: S311  (a schedule, not a secret)
    loop, responses, slots = asyncio.get_running_loop(), Counter[str](), asyncio.Semaphore(AT_ONCE)
    await _status("GET", f"{url}/healthz")  # the listener is open before the application is ready
    began, number, shown = loop.time(), 0, 0
    async with asyncio.TaskGroup() as group:
        while ((passed := loop.time() - began) < seconds or number < len(KINDS)) and not is_over():
            if passed >= shown + EVERY:
                shown = int(passed)
                traffic.progress(shown, seconds, responses)
            await slots.acquire()
            task = group.create_task(_pursue(url, drawn(traffic.seed, number, chance), responses))
            task.add_done_callback(lambda _: slots.release())
            number += 1
            await asyncio.sleep(max(0.0, began + number / PER_SECOND - loop.time()))
    traffic.progress(min(seconds, int(loop.time() - began)), seconds, responses)


async def _pursue(url: str, wanted: Send, responses: Counter[str]) -> None:
    kind = wanted.kind
    for attempt, body in enumerate(wanted.bodies):
        if attempt:
            await asyncio.sleep(wanted.pause)
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {wanted.tenant}",
            "Idempotency-Key": wanted.key,
            **({} if attempt else kind.faults),
        }
        statuses = await asyncio.gather(
            *(_status("POST", f"{url}{kind.path}", body, headers) for _ in range(kind.together))
        )
        responses.update(statuses)


async def _status(method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> str:
    try:
        reply = await ask(method, url, content=body, headers=headers)
    except (NothingSentError, AnswerLostError):
        return "lost"
    return f"{reply.status} replayed" if "idempotent-replayed" in reply.headers else str(reply.status)
