"""Who is calling: two tenants, each known by its bearer token."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from oncekey.demo.problems import ProblemError
from oncekey.frameworks.resuming import resumed_as

TENANTS: Final = {"demo-alpha": "alpha", "demo-beta": "beta"}
"""Tokens, and whose they are. A real service would look them up, and would not print them."""

_REALM: Final = 'Bearer realm="oncekey demo"'
_bearer = HTTPBearer(auto_error=False, description="`demo-alpha` or `demo-beta`")


async def authenticate(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> str:
    """The caller's tenant; it is left on the request, where `tenant_of` finds it when the key is claimed."""
    resumed = resumed_as(request)
    if resumed is not None:
        # A completer has no token: it goes on with what this tenant was let in for.
        request.state.tenant = resumed
        return resumed
    if credentials is None:
        raise _unauthorized("Send `Authorization: Bearer demo-alpha` or `Bearer demo-beta`.", _REALM)
    tenant = TENANTS.get(credentials.credentials)
    if tenant is None:
        raise _unauthorized("This token is not known.", f'{_REALM}, error="invalid_token"')
    request.state.tenant = tenant
    return tenant


def tenant_of(request: Request) -> str:
    """Whose key it is, for `once.install(tenant=...)`."""
    tenant: str = request.state.tenant
    return tenant


Tenant = Annotated[str, Depends(authenticate)]


def _unauthorized(detail: str, challenge: str) -> ProblemError:
    return ProblemError(HTTPStatus.UNAUTHORIZED, "unauthorized", detail, {"www-authenticate": challenge})
