"""Idempotent tools for servers of the official Model Context Protocol SDK (`pip install mcp`).

    @server.tool()
    @tool
    @once.function(key=sent_key, effects=LOCAL, ignore=("ctx",))
    async def pay(op: Operation, ctx: Context, order: str) -> Payment: ...

The protocol has no idempotency key: its request ids are new on every attempt. A client sends a key as
`oncekey/idempotency-key` in the `_meta` of its call; a tool can also take it from an argument, with `key="order"`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oncekey.core.errors import ConfigurationError, OncekeyError, RejectedError
from oncekey.runtimes.aio import shielded

if TYPE_CHECKING:
    from oncekey.frameworks.functions import CallOutcome, Function

F = TypeVar("F", bound=Callable[..., Any])

KEY: Final = "oncekey/idempotency-key"
"""The name of the key in the `_meta` of a call."""
NO_KEY: Final = f"send a key that is the same on every attempt of this call, as {KEY} in its _meta"
WRONG_ORDER: Final = "put @tool above @once.function(...), and below @server.tool()"


def sent_key(ctx: Any) -> str:  # noqa: ANN401  (a Context of an optional package)
    """The key that a client sent with its call; for `once.function(key=sent_key)`."""
    found = (ctx.request_context.meta or {}).get(KEY)
    if not isinstance(found, str):
        raise _tool_error(NO_KEY)
    return found


def tool(function: F) -> F:
    """A protected function as a tool: it finishes even if the client gives up, and refusals are readable errors.

    The SDK cancels a tool whose client has waited too long, and hides exceptions. Here the function runs to its end, so
    that the client's next attempt gets its result; and a refusal by oncekey becomes an error that the client can read.
    An exception of the function stays an exception of the tool, even if it is an error of another protected function.
    """
    protected: Function | None = getattr(function, "__oncekey_function__", None)
    if protected is None:
        raise ConfigurationError(WRONG_ORDER)

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if protected.is_bare(args, kwargs):
            return await function(*args, **kwargs)
        return _value_of(await shielded(protected.arun(args, kwargs)))

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if protected.is_bare(args, kwargs):
            return function(*args, **kwargs)
        return _value_of(protected.run(args, kwargs))

    wrapper: Any = awaited if inspect.iscoroutinefunction(function) else plain
    return wrapper  # type: ignore[no-any-return]


def _value_of(outcome: CallOutcome) -> Any:  # noqa: ANN401  (what the function returns)
    if outcome.refusal is not None:
        raise _tool_error(_text_of(outcome.refusal)) from outcome.refusal
    return outcome.value


def _text_of(error: OncekeyError) -> str:
    """The text for the client; a rejection is the tool's own result."""
    if isinstance(error, RejectedError):
        return str(error.value)
    wait = getattr(error, "retry_after", None)
    return str(error) if wait is None else f"{error}; call it again with the same key in {wait} seconds"


def _tool_error(message: str) -> Exception:
    from mcp.server.mcpserver.exceptions import ToolError  # noqa: PLC0415  (an optional package)

    return ToolError(message)
