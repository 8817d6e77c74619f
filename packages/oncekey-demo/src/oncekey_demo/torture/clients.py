"""The clients of a run: each sends a request several times, in parallel, and sometimes with another body by mistake."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Final

from oncekey.canonical.fingerprint import Request
from oncekey.canonical.whole import fingerprint
from oncekey.core.model import Code
from oncekey_demo.charging import AnswerLostError, NothingSentError, Reply, ask
from oncekey_demo.history import ClientOperation, ClientSaw
from oncekey_demo.provider_ledger import FaultKind as Fault
from oncekey_demo.torture.shop import FAULT, PAUSE, RAISE, Wanted, now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


async def post(port: int, path: str, content: bytes, headers: Mapping[str, str], patience: float) -> Reply | None:
    """Send a request to a server of the run; None if there was no complete response in time."""
    fields = {"Content-Type": "application/json", **headers}
    try:
        async with asyncio.timeout(patience):
            url = f"http://127.0.0.1:{port}{path}"
            return await ask("POST", url, content=content, headers=fields, patience=patience)
    except (NothingSentError, AnswerLostError, TimeoutError):
        return None


ROUTES: Final[Mapping[str, int]] = {"/orders": 2, "/bookings": 2, "/payments": 4, "/transfers": 2, "/notifications": 2}
"""The routes, with their relative frequencies."""
UNSHARED: Final = ("/payments", "/notifications")
"""The routes that work on a store that shares no transaction with the application."""
_LOCAL: Final = frozenset({"/orders", "/bookings"})
FAULTS: Final = (
    Fault.DROP_AFTER.value,
    Fault.ERROR_AFTER.value,
    Fault.HANG_AFTER.value,
    Fault.DROP_BEFORE.value,
    Fault.ERROR_BEFORE.value,
    f"{Fault.DELAY.value}:0.3",
)
"""The faults of one call to the provider. A decline is a response, not a fault, so it is part of the request."""
PATIENCE: Final = 2.0
MOST_KEYS: Final = 200_000
ACCEPTED: Final = "accepted"
_ANSWERS: Final = frozenset({200, 201, 402})
_FINAL: Final = frozenset({Code.OUTCOME_UNKNOWN.value, Code.KEY_REUSED.value})


@dataclass(frozen=True, slots=True)
class IntendedRequest:
    """The request that a client intends, under one key."""

    key: str
    route: str
    wanted: Wanted
    rival: Wanted | None = None
    """Another body that the client sends under the same key, by mistake."""
    leaves: bool = False
    """Whether the client sends the request once and never retries: the workers have to finish without it."""

    @property
    def charges(self) -> bool:
        """Whether the request charges at the provider."""
        return self.route not in _LOCAL


@dataclass(slots=True)
class Clients:
    """The shared state of all clients of a run, and their responses."""

    seed: int
    scope: str
    ports: Callable[[], Sequence[int]]
    routes: Sequence[str] = tuple(ROUTES)
    """The paths to which they send."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when clients must not start another key."""
    operations: list[ClientOperation] = field(default_factory=list)
    intended_requests: dict[str, IntendedRequest] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    answers: Counter[str] = field(default_factory=Counter)
    labels: dict[str, str] = field(default_factory=dict)

    async def run(self, number: int) -> None:
        """Run one client, from its first key to its last."""
        chance = Random(f"{self.seed}/client/{number}")  # noqa: S311  (a schedule, no secret)
        count = 0
        while not self.over.is_set() and len(self.intended_requests) < MOST_KEYS:
            count += 1
            intended = draw(f"torture-{self.seed}-{number:02}-{count:06}", chance, self.routes)
            self.intended_requests[intended.key] = intended
            await self._pursue(intended, chance)

    async def insist(self, intended: IntendedRequest, chance: Random) -> None:
        """Retry a key after the faults have ended, until it has a response."""
        wanted, final = intended.wanted, None
        while final is None:
            final = await self._volley(intended, (wanted,), chance, {}, PATIENCE * 2)
            if final is None:
                await asyncio.sleep(chance.uniform(0.1, 0.4))
        if final == Code.KEY_REUSED.value and intended.rival is not None:
            await self.insist(replace(intended, wanted=intended.rival, rival=None), chance)

    async def _pursue(self, intended: IntendedRequest, chance: Random) -> None:
        wanted, first = intended.wanted, True
        while True:
            bodies = [wanted] * (chance.randint(2, 4) if chance.random() < 0.25 else 1)  # noqa: PLR2004  (a share)
            if intended.rival is not None and chance.random() < 0.5:  # noqa: PLR2004
                bodies.append(intended.rival)
            patience = chance.uniform(0.2, PATIENCE) if chance.random() < 0.3 else PATIENCE  # noqa: PLR2004
            final = await self._volley(intended, bodies, chance, _trouble(intended, chance) if first else {}, patience)
            if final == Code.KEY_REUSED.value and intended.rival is not None:
                # The other body arrived first, so the key belongs to it.
                wanted, intended = intended.rival, replace(intended, rival=None)
                continue
            if final or intended.leaves:
                break
            first = False
            await asyncio.sleep(chance.uniform(0.02, 0.4))
        if chance.random() < 0.2 and not intended.leaves:  # noqa: PLR2004
            await self._volley(intended, (wanted,), chance, {}, PATIENCE)

    async def _volley(
        self,
        intended: IntendedRequest,
        bodies: Sequence[Wanted],
        chance: Random,
        headers: Mapping[str, str],
        patience: float,
    ) -> str | None:
        """Send bodies at the same moment; returns the final response to the first of them, if any."""
        ports = self.ports()
        sends = [self._send(intended, body, chance.choice(ports), headers, patience) for body in bodies]
        ending_of = await asyncio.gather(*sends)
        same = [word for word, body in zip(ending_of, bodies, strict=True) if word and body == bodies[0]]
        if same:
            self.answered.add(intended.key)
        return same[0] if same else None

    async def _send(
        self, intended: IntendedRequest, wanted: Wanted, port: int, headers: Mapping[str, str], patience: float
    ) -> str | None:
        content = json.dumps(wanted.data()).encode()
        print_ = fingerprint(Request("POST", intended.route, b"", b"application/json", content))
        self.labels[print_] = wanted.label
        invoked = now()
        answer = await post(
            port, intended.route, content, {"Idempotency-Key": f'"{intended.key}"', **headers}, patience
        )
        kind, code = ending_of(answer)
        replayed = answer is not None and answer.headers.get("idempotent-replayed") == "true"
        self.answers[_name(answer, kind, code, replayed=replayed)] += 1
        operation = ClientOperation(
            id=f"request {len(self.operations) + 1}",
            scope=self.scope,
            key=intended.key,
            fingerprint=wanted.label,
            invoked=invoked,
            ended=None if answer is None else now(),
            kind=kind,
            status=None if answer is None else answer.status,
            body=None if answer is None else answer.body,
            replayed=replayed,
            code=code,
        )
        self.operations.append(operation)
        return "answer" if kind is ClientSaw.OK else code if code in _FINAL else None


def draw(key: str, chance: Random, routes: Sequence[str] = tuple(ROUTES)) -> IntendedRequest:
    """Draw a random request."""
    route = chance.choices(routes, [ROUTES[one] for one in routes])[0]
    recognises = route != "/notifications" and chance.random() < 0.7  # noqa: PLR2004  (a share)
    declines = route not in _LOCAL and chance.random() < 0.06  # noqa: PLR2004
    wanted = Wanted(key, chance.randint(1, 1_000_000), recognises, declines)
    rival = replace(wanted, cents=wanted.cents + 1) if chance.random() < 0.08 else None  # noqa: PLR2004
    leaves = rival is None and chance.random() < 0.12  # noqa: PLR2004
    return IntendedRequest(key, route, wanted, rival, leaves)


def ending_of(answer: Reply | None) -> tuple[ClientSaw, str | None]:
    """The meaning of a response for its client, with the code of a refusal."""
    if answer is None:
        return ClientSaw.INFO, None
    if answer.status in _ANSWERS:
        return ClientSaw.OK, None
    if answer.status == 202:  # noqa: PLR2004
        return ClientSaw.FAIL, ACCEPTED
    try:
        code = str(json.loads(answer.body)["code"])
    except (ValueError, KeyError, TypeError):
        code = f"status {answer.status}"
    return (ClientSaw.INFO if code == Code.STORE_UNAVAILABLE.value else ClientSaw.FAIL), code


def _trouble(intended: IntendedRequest, chance: Random) -> dict[str, str]:
    """The headers with faults for the first send; a retry has none."""
    headers: dict[str, str] = {}
    if chance.random() < 0.3:  # noqa: PLR2004
        headers[PAUSE] = f"{chance.uniform(0, 0.3):.3f}"
    if intended.charges and not intended.wanted.declines and chance.random() < 0.15:  # noqa: PLR2004
        headers[FAULT] = chance.choice(FAULTS)
    if intended.route != "/notifications" and chance.random() < 0.04:  # noqa: PLR2004
        headers[RAISE] = "1"
    return headers


def _name(answer: Reply | None, kind: ClientSaw, code: str | None, *, replayed: bool) -> str:
    if answer is None:
        return "no response"
    if kind is ClientSaw.OK:
        return f"{answer.status}{' replayed' if replayed else ''}"
    return code or str(answer.status)
