"""ASGI: a plain middleware that captures and settles, and a decorator that claims at the route; and its types.

The two meet in one `Exchange` per keyed request. The middleware sits innermost, so that compression, CORS and
request ids are fresh on every replay; the claim is taken at the route, after authentication and validation.
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
