"""ASGI: a middleware that captures and settles, a decorator that claims at the route, and the ASGI types.

The two share one `Exchange` per keyed request. The middleware is the innermost one, so compression, CORS and request
ids are applied to every replay, too; the claim is made at the route, after authentication and validation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

Identify: TypeAlias = Callable[[Scope], "str | Awaitable[str]"]
"""Returns the tenant (or the principal) of an authenticated request."""
