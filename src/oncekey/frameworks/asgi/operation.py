"""What a handler is handed: `Operation` for `async def`, `SyncOperation` for `def`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn

from oncekey.core.errors import ConfigurationError, LeaseLostError
from oncekey.core.seed import downstream_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import TypeVar

    Conn = TypeVar("Conn", default=Any)
else:
    from typing import TypeVar

    Conn = TypeVar("Conn")

NO_CONNECTION = (
    "op.connection is for effects=LOCAL, where the business rows commit with the key; an INLINE handler opens its own"
)
WRONG_ORDER = (
    "put @once.protect(...) directly above the function and below the route decorator: "
    "the framework must see the wrapped handler, which has no `op` parameter"
)


class _Held(Generic[Conn]):
    """What both kinds of operations hold; a lost lease makes all of it refuse (P3)."""

    def __init__(
        self,
        *,
        key: str | None,
        scope: str,
        attempt: int = 1,
        seed: bytes = b"",
        connection: Conn | None = None,
        lost: Callable[[], bool] = bool,
    ) -> None:
        self._key = key
        self._scope = scope
        self._attempt = attempt
        self._seed = seed
        self._connection = connection
        self._lost = lost
        self.kept = False
        self.rolled_back = False

    @property
    def key(self) -> str | None:
        """The client's key; None on a route with an optional key, where the request sent none."""
        return self._key

    @property
    def scope(self) -> str:
        """Whose key it is."""
        return self._scope

    @property
    def attempt(self) -> int:
        """1 for the first run, more after a take-over."""
        return self._attempt

    @property
    def connection(self) -> Conn:
        """The open business transaction: what is written through it commits with the key, or not at all."""
        self._owned()
        if self._connection is None:
            raise ConfigurationError(NO_CONNECTION)
        return self._connection

    def downstream_key(self, name: str) -> str:
        """The key to send to a provider for the call `name`: the same on every attempt of this request (D1)."""
        self._owned()
        return downstream_key(self._seed, name)

    def keep(self) -> None:
        """Commit the business rows even if the handler ends by raising what becomes a final 4xx."""
        self._owned()
        self.kept = True

    def rollback(self) -> None:
        """Undo the business rows even if the handler returns; the answer is stored by itself."""
        self._owned()
        self.rolled_back = True

    def _owned(self) -> None:
        if self._lost():
            raise LeaseLostError("somebody else owns this key now: what this handler still does is not stored")

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> NoReturn:
        """A framework that asks how to validate an operation sees the bare handler: the order is wrong."""
        raise ConfigurationError(WRONG_ORDER)


class Operation(_Held[Conn]):
    """One protected request, for an `async def` handler."""


class SyncOperation(_Held[Conn]):
    """One protected request, for a `def` handler, which runs in a thread."""
