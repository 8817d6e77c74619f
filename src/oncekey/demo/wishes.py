"""What the headers of a request wish upon the provider, so that a person can watch every fault.

`X-Demo-Fault: drop-after`, `X-Demo-Dedup: off`, `X-Demo-Repeatable: off`.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Header

from oncekey.demo.problems import ProblemError
from oncekey.demo.provider.faults import NAMES, Fault, UnknownFaultError

_FAULT = f"What the provider is to do: {', '.join(NAMES)}. It strikes the request that brings it, and no other."
_DEDUP = "`off`: the provider ignores downstream keys."
_REPEATABLE = "`off`: the call to the provider is one that may not be repeated."


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the provider is to behave, and what is believed of it."""

    fault: str | None = None
    deduplicate: bool = True
    repeatable: bool = True


async def wished(
    x_demo_fault: Annotated[str | None, Header(description=_FAULT)] = None,
    x_demo_dedup: Annotated[str, Header(description=_DEDUP)] = "on",
    x_demo_repeatable: Annotated[str, Header(description=_REPEATABLE)] = "on",
) -> Wishes:
    """The wishes of a request."""
    try:
        fault = str(Fault.parse(x_demo_fault)) if x_demo_fault else None
    except UnknownFaultError as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "unknown_fault", str(error)) from None
    return Wishes(fault, _on("X-Demo-Dedup", x_demo_dedup), _on("X-Demo-Repeatable", x_demo_repeatable))


Wished = Annotated[Wishes, Depends(wished)]


def _on(name: str, value: str) -> bool:
    if value.lower() not in {"on", "off"}:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "invalid_switch", f"{name} is on or off.")
    return value.lower() == "on"
