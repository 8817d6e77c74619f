"""`SyncOperation`: what a `def` handler gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, overload

from oncekey.engine.operation import Conn, Held, R

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


class SyncOperation(Held[Conn]):
    """One protected request, for a `def` handler, which runs in a thread."""

    blocking = True

    def phase(self, name: str, fn: Callable[[Any], R]) -> R:
        """Run `fn(connection)` in a transaction of its own, once; later runs get the stored result."""
        return cast("R", self._steps("phase").phase(name, fn))

    @overload
    def call(
        self,
        name: str,
        fn: Callable[[str], Any],
        *,
        repeatable: bool | timedelta,
        parameters: object = None,
        result: type[R],
    ) -> R: ...

    @overload
    def call(
        self,
        name: str,
        fn: Callable[[str], Any],
        *,
        repeatable: bool | timedelta,
        parameters: object = None,
        result: Callable[[Any], R],
    ) -> R: ...

    @overload
    def call(
        self, name: str, fn: Callable[[str], R], *, repeatable: bool | timedelta, parameters: object = None
    ) -> R: ...

    def call(
        self,
        name: str,
        fn: Callable[[str], Any],
        *,
        repeatable: bool | timedelta,
        parameters: object = None,
        result: Any = None,
    ) -> Any:
        """Make one outside call; see `Operation.call`. It has a thread of its own, so that it can time out."""
        return self._steps("call").call(name, fn, repeatable=repeatable, parameters=parameters, result=result)

    def value(self, name: str, fn: Callable[[], R]) -> R:
        """Run `fn()` once and store what may differ from run to run: the time, a random number, an id."""
        return cast("R", self._steps("value").value(name, fn))
