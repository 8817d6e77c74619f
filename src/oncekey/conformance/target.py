"""What is to be checked, as its owner describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oncekey.conformance.clauses import Need
from oncekey.conformance.shots import Address, Header

_SECRET_WORDS: Final = ("authorization", "cookie", "token", "secret", "api-key", "apikey", "password", "signature")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An operation that must happen once, and what helps to see whether it does.

    Only the address and the body are needed; every other field lets more clauses be judged.
    """

    address: Address
    body: bytes
    method: str = "POST"
    headers: tuple[Header, ...] = ()
    is_json: bool = True
    other_body: bytes | None = None
    invalid_body: bytes | None = None
    other_tenant: tuple[Header, ...] = ()
    slow: Header | None = None
    fail: Header | None = None
    count_address: Address | None = None
    count_pointer: str = ""
    openapi: Address | None = None
    other_address: Address | None = None
    unsafe_methods: bool = False
    key_optional: bool = False
    patience: float = 15.0
    """Seconds in which a request that was cut off must be over."""
    timeout: float = 30.0
    """Seconds to wait for one answer."""

    def lacks(self, need: Need) -> bool:
        """Whether something that a clause needs was not given."""
        match need:
            case Need.COUNT:
                return self.count_address is None
            case Need.SLOW:
                return self.slow is None
            case Need.OTHER_TENANT:
                return not self.other_tenant
            case Need.OTHER_BODY:
                return self.other_body is None
            case Need.OTHER_URL:
                return self.other_address is None
            case Need.JSON:
                return not self.is_json
            case Need.FAIL:
                return self.fail is None
            case Need.CREDENTIALS:
                return not any(is_secret(name) for name, _ in self.headers)
            case Need.UNSAFE:
                return not self.unsafe_methods


def is_secret(name: str) -> bool:
    """Whether a field's value is nobody else's business."""
    return any(word in name.lower() for word in _SECRET_WORDS)


def replaced(headers: tuple[Header, ...], new: tuple[Header, ...]) -> tuple[Header, ...]:
    """The headers with new values for some names."""
    names = {name.lower() for name, _ in new}
    return (*(line for line in headers if line[0].lower() not in names), *new)
