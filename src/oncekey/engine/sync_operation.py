"""`SyncOperation`: the operation of a `def` handler."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from oncekey.core.errors import ConfigurationError
from oncekey.engine.operation import Conn, Held, P, R

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Concatenate

    from oncekey.engine.step_types import blocking_call
else:
    from oncekey.engine.operation import async_call as blocking_call

NOT_AWAITED = "the step {name!r} is `async def`, and its handler is `def`: make both the same"


class SyncOperation(Held[Conn]):
    """One protected request, for a `def` handler, which runs in a thread."""

    blocking = True

    def phase(self, name: str, fn: Callable[Concatenate[Conn, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(connection, *args, **kwargs)` in its own transaction, once; later runs get the stored result."""
        return cast("R", self._steps("phase").phase(name, _blocking(name, fn), args, kwargs))

    @blocking_call
    def call(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: object,
        repeatable: bool | timedelta,
        parameters: object = None,
        result: object = None,
    ) -> object:
        """Make one outside call; see `Operation.call`. It runs in a separate thread, so that it can time out."""
        steps = self._steps("call")
        fn = _blocking(name, fn)
        return steps.call(name, fn, args, repeatable=repeatable, parameters=parameters, result=result)

    def value(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(*args, **kwargs)` once and store its result, which may differ between runs."""
        return cast("R", self._steps("value").value(name, _blocking(name, fn), args, kwargs))


def _blocking(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a step; raises for a coroutine function, which nothing would await."""
    if inspect.iscoroutinefunction(fn):
        raise ConfigurationError(NOT_AWAITED.format(name=name))
    return fn
