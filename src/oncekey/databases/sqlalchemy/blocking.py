"""A blocking SQLAlchemy `Engine` in place of a URL.

A pool that was created before a fork belongs to the parent process: the child's engines get an empty one.
"""

from __future__ import annotations

import os
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy.engine import Engine

from oncekey.databases.sqlalchemy.engines import check_engine
from oncekey.databases.sqlalchemy.generated.driver import BlockingSqlalchemyDriver


class BorrowedEngine:
    """Wraps the application's engine for `Once`."""

    def __init__(self, engine: Engine) -> None:
        check_engine(engine)
        self._engine = engine
        FORKING.add(self)

    @property
    def dialect(self) -> str:
        """The database's dialect."""
        return self._engine.dialect.name

    @property
    def title(self) -> str:
        return self._engine.url.render_as_string(hide_password=True)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines whose pools a forked process must not use."""
        return (self._engine,)

    def driver(self) -> BlockingSqlalchemyDriver:
        """A new driver on the engine."""
        return BlockingSqlalchemyDriver(self._engine)


FORKING: Final[WeakSet[Any]] = WeakSet()
"""Every object that has `engines`."""
_parents: Final[list[Any]] = []
"""The pools of a parent process. Closing or collecting them here would end the parent's sessions."""


def _forked() -> None:
    for lender in FORKING:
        for engine in lender.engines:
            _parents.append(engine.pool)
            engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
