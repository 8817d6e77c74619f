"""The service as a Django project in one module: function views, and REST framework's for orders.

Django is configured once in a process, so the suite makes this application only in processes that serve it or run a
command for it. Keys live in the project's own database, and rows are written on the connection of Django's models.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.http import require_POST, require_safe
from psycopg.conninfo import conninfo_to_dict

from oncekey.engine.operation import SyncOperation
from oncekey.frameworks.resuming import resumed_as
from oncekey.once import Once
from skins.service import ROUTES, Asked, Route, Said, Service

urlpatterns: list[Any] = []
"""What `make` has routed."""


def once(url: str, **options: Any) -> Once:
    """The project's `Once`, after the project was set up."""
    settings.configure(
        SECRET_KEY="of the tests",
        ALLOWED_HOSTS=["*"],
        USE_TZ=True,
        DATABASES={"default": _database(url)},
        INSTALLED_APPS=["rest_framework", "oncekey.django"],
        MIDDLEWARE=["oncekey.django.Middleware"],
        ROOT_URLCONF=__name__,
        REST_FRAMEWORK={"UNAUTHENTICATED_USER": None},
        ONCEKEY="skins.served.once",
    )
    django.setup()
    from oncekey.django import Database
    from oncekey.django import Once as DjangosOnce

    return DjangosOnce(Database("default"), tenant=lambda request: request.user, **options)


def _database(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        options: dict[str, Any] = {"transaction_mode": "IMMEDIATE", "timeout": 30}
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///"), "OPTIONS": options}
    options = conninfo_to_dict(url.replace("+psycopg", ""))
    return {"ENGINE": "django.db.backends.postgresql", "NAME": options.pop("dbname"), "OPTIONS": options}


def make(service: Service) -> Any:
    restful, *others = ROUTES
    urlpatterns[:] = [
        path(restful.path[1:], _orders(service, restful).as_view()),
        *(path(route.path[1:], _view(service, route)) for route in others),
        path("idempotency-keys/<path:key>", _status(service)),
    ]
    return get_wsgi_application()


def _admitted(service: Service, request: Any) -> tuple[str, int]:
    resumed = resumed_as(request)
    return (resumed, 200) if resumed else service.admits(request.headers.get("Authorization", ""), request.method)


def _status(service: Service) -> Any:
    @require_safe
    def view(request: Any, key: str) -> Any:
        request.user, status = _admitted(service, request)
        return service.once.status_view(request, key) if status == 200 else HttpResponse(status=status)

    return view


def _view(service: Service, route: Route) -> Any:
    def authenticated(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def admitting(request: Any) -> Any:
            request.user, status = _admitted(service, request)
            return view(request) if status == 200 else HttpResponse(status=status)

        return admitting

    @require_POST
    @authenticated
    @service.once.protect(effects=route.effects, operation=route.operation, **route.options)
    def view(request: Any, op: SyncOperation[Any]) -> Any:
        if not service.takes(route.path, request.body):
            return HttpResponse(status=422)
        asked = Asked(request.user, json.loads(request.body), float(request.headers.get("X-Delay", 0)))
        said = service.blocking(route.does(asked), asked, op)
        if said.pieces:
            return StreamingHttpResponse(iter(said.pieces), status=said.status, headers=said.headers)
        return HttpResponse(said.content, status=said.status, headers=said.headers)

    return view


def _orders(service: Service, route: Route) -> Any:
    from rest_framework import authentication, exceptions, permissions, serializers
    from rest_framework.response import Response
    from rest_framework.views import APIView

    class Tokens(authentication.BaseAuthentication):
        def authenticate(self, request: Any) -> tuple[str, int]:
            tenant, status = _admitted(service, request._request)
            if status == 401:
                raise exceptions.AuthenticationFailed
            return tenant, status

        def authenticate_header(self, request: Any) -> str:
            return "Bearer"

    class MayCall(permissions.BasePermission):
        def has_permission(self, request: Any, view: Any) -> bool:
            return request.auth == 200

    class Order(serializers.Serializer):
        item = serializers.CharField()

    def valid(view: Any) -> None:
        Order(data=view.request.data).is_valid(raise_exception=True)

    def answered(said: Said) -> Response:
        return Response(said.body, said.status, headers=said.headers)

    class Orders(APIView):
        authentication_classes = (Tokens,)
        permission_classes = (MayCall,)

        def get(self, request: Any) -> Response:
            return answered(service.orders(request.user))

        @service.once.protect(effects=route.effects, operation=route.operation, authorise=valid, **route.options)
        def post(self, request: Any, op: SyncOperation[Any]) -> Response:
            asked = Asked(request.user, request.data, float(request.headers.get("X-Delay", 0)))
            return answered(service.blocking(route.does(asked), asked, op))

    return Orders
