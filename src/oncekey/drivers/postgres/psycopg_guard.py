"""The psycopg connection that a handler gets: everything but the end of the transaction (L5).

When the operation is over, another request gets the connection, so from then on the guard refuses every call.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from psycopg import sql

from oncekey.drivers.guard import Lending, refusal, refuse_transaction_control

_SETTINGS: Final = frozenset({"autocommit", "isolation_level", "read_only", "deferrable"})


class Guarded:
    """What blocking and asyncio have in common: pass every call on, unless the operation is over."""

    __slots__ = ("_lending", "_raw")

    def __init__(self, raw: Any, lending: Lending) -> None:  # noqa: ANN401  (any connection or cursor of psycopg)
        object.__setattr__(self, "_raw", raw)
        object.__setattr__(self, "_lending", lending)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever psycopg has there)
        self._lending.check()
        return getattr(self._raw, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS:
            raise refusal(f"setting {name}")
        self._lending.check()
        setattr(self._raw, name, value)

    def __repr__(self) -> str:
        return f"<guarded {self._raw!r}>"

    def _check(self, query: Any) -> None:  # noqa: ANN401  (text, bytes, or whatever composes a statement)
        self._lending.check()
        refuse_transaction_control(_text(query, self._raw))


class GuardedFromEnding(Guarded):
    """The refusals of a connection; they are raised before anything is awaited."""

    __slots__ = ()

    def _refuse(self, what: str) -> NoReturn:
        raise refusal(what)

    def commit(self) -> NoReturn:
        """Refused."""
        self._refuse("commit()")

    def rollback(self) -> NoReturn:
        """Refused."""
        self._refuse("rollback()")

    def close(self) -> NoReturn:
        """Refused."""
        self._refuse("close()")

    def set_autocommit(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_autocommit()")

    def set_isolation_level(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_isolation_level()")

    def set_read_only(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_read_only()")

    def set_deferrable(self, _: object) -> NoReturn:
        """Refused."""
        self._refuse("set_deferrable()")

    def tpc_begin(self, *_: object) -> NoReturn:
        """Refused."""
        self._refuse("tpc_begin()")

    def tpc_prepare(self) -> NoReturn:
        """Refused."""
        self._refuse("tpc_prepare()")

    def tpc_commit(self, *_: object) -> NoReturn:
        """Refused."""
        self._refuse("tpc_commit()")

    def tpc_rollback(self, *_: object) -> NoReturn:
        """Refused."""
        self._refuse("tpc_rollback()")


def _text(query: Any, context: Any) -> str:  # noqa: ANN401  (text, bytes, or whatever composes a statement)
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    if isinstance(query, sql.Composable):
        return query.as_string(context)
    return sql.as_string(query, context)  # a template string
