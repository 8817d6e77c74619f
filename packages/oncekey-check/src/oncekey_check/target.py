"""The API under test, as described by options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from oncekey_check.carrier import ANY_UUID, Carrier, Header, KeyFormat
from oncekey_check.clauses import Need
from oncekey_check.raw_http import Address

_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_SECRET_WORDS: Final = ("authorization", "cookie", "token", "secret", "api-key", "apikey", "password", "signature")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An operation that must happen once, and what the tester needs to observe it.

    Only the address and the body are required; every other field allows judging more clauses.
    """

    address: Address
    body: bytes
    method: str = "POST"
    headers: tuple[Header, ...] = ()
    is_json: bool = True
    other_body: bytes | None = None
    invalid_body: bytes | None = None
    other_tenant: tuple[Header, ...] = ()
    same_caller: tuple[Header, ...] = ()
    """Other credentials of the same caller, such as a renewed token."""
    slow: Header | None = None
    fail: Header | None = None
    count_address: Address | None = None
    count_pointer: str = ""
    openapi: Address | None = None
    other_address: Address | None = None
    also_address: Address | None = None
    """The same operation on a second instance of the API."""
    declined_body: bytes | None = None
    """A body that the operation refuses permanently, such as a declined card."""
    large: Header | None = None
    """The header that makes the response large."""
    lease: float | None = None
    """Seconds after which the API treats a running request as dead."""
    crash_command: tuple[str, ...] = ()
    """Kills the server without warning and restarts it."""
    store_down_command: tuple[str, ...] = ()
    store_up_command: tuple[str, ...] = ()
    command_limit: float = 60.0
    """Seconds that a command, and the restart of the server, may take."""
    carrier: Carrier = field(default_factory=Carrier)
    key_format: KeyFormat = ANY_UUID
    """The format of the keys that the API accepts."""
    unothers: bool = False
    key_optional: bool = False
    patience: float = 15.0
    """Seconds after which a request that was cut off must have ended."""
    timeout: float = 30.0
    """Seconds to wait for one response."""

    @property
    def noun(self) -> str:
        """The noun for one success of the operation, from the URL: `/orders` gives `order`."""
        words = [word for word in self.address.path.lower().split("/") if re.fullmatch(r"[a-z][a-z_-]+", word)]
        last = words[-1] if words else "operation"
        if last.endswith("ies"):
            return f"{last[:-3]}y"
        return last[:-1] if last.endswith("s") and not last.endswith("ss") else last

    def slower_than(self, seconds: float) -> Header | None:
        """The slow header with another number in it, or None if it has no number."""
        if self.slow is None or not _NUMBER.search(self.slow[1]):
            return None
        return self.slow[0], _NUMBER.sub(f"{seconds:.2f}", self.slow[1], count=1)

    def lacks(self, need: Need) -> bool:
        """Whether something that a clause needs was not given."""
        return not _GIVEN[need](self)


_GIVEN: Final[Mapping[Need, Callable[[Target], object]]] = {
    Need.COUNT: lambda target: target.count_address,
    Need.SLOW: lambda target: target.slow,
    Need.OTHER_TENANT: lambda target: target.other_tenant,
    Need.SAME_CALLER: lambda target: target.same_caller,
    Need.OTHER_BODY: lambda target: target.other_body is not None,
    Need.OTHER_URL: lambda target: target.other_address,
    Need.JSON: lambda target: target.is_json,
    Need.FAIL: lambda target: target.fail,
    Need.CREDENTIALS: lambda target: any(is_secret(name) for name, _ in target.headers),
    Need.UNSAFE: lambda target: target.unothers,
    Need.DECLINED: lambda target: target.declined_body is not None,
    Need.LARGE: lambda target: target.large,
    Need.ALSO: lambda target: target.also_address,
    Need.LEASE: lambda target: target.lease,
    Need.CRASH: lambda target: target.crash_command,
    Need.OUTAGE: lambda target: target.store_down_command,
}


def is_secret(name: str) -> bool:
    """Whether a header's value is a credential."""
    return any(word in name.lower() for word in _SECRET_WORDS)


def replaced(headers: tuple[Header, ...], new: tuple[Header, ...]) -> tuple[Header, ...]:
    """The headers with new values for some names."""
    names = {name.lower() for name, _ in new}
    return (*(line for line in headers if line[0].lower() not in names), *new)
