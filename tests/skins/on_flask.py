"""The service as a Flask application, which authenticates before each request."""

from __future__ import annotations

from typing import Any

import flask

from oncekey.engine.operation import SyncOperation
from oncekey.frameworks.resuming import resumed_as
from skins.service import ROUTES, Asked, Route, Said, Service


def make(service: Service) -> flask.Flask:
    once, app = service.once, flask.Flask("service")

    @app.before_request
    def authenticate() -> None:
        resumed = resumed_as(flask.request)
        token = flask.request.headers.get("Authorization", "")
        tenant, status = (resumed, 200) if resumed else service.admits(token, flask.request.method)
        if status != 200:
            flask.abort(status)
        flask.g.tenant = tenant
        if flask.request.method == "POST" and not service.takes(flask.request.path, flask.request.get_data()):
            flask.abort(422)

    def add(route: Route) -> None:
        @once.protect(effects=route.effects, operation=route.operation, **route.options)
        def view(op: SyncOperation[Any]) -> flask.Response:
            delay = float(flask.request.headers.get("X-Delay", 0))
            asked = Asked(flask.g.tenant, flask.request.get_json(), delay)
            return _answered(service.blocking(route.does(asked), asked, op))

        app.add_url_rule(route.path, f"post {route.path}", view, methods=["POST"])

    for route in ROUTES:
        add(route)

    @app.get("/orders")
    def orders() -> flask.Response:
        return _answered(service.orders(flask.g.tenant))

    once.flask(app, tenant=lambda _: flask.g.tenant)
    return app


def _answered(said: Said) -> flask.Response:
    body: Any = iter(said.pieces) if said.pieces else said.content
    return flask.Response(body, said.status, said.headers)
