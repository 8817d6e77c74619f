"""The shop on Django behind django-idempotency-key, as its README shows it: its middleware with all its defaults."""

from __future__ import annotations

import json
import time
from socketserver import ThreadingMixIn
from typing import Any

import django
from counted import CALLERS, announce, placed, total
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import WSGIRequestHandler, WSGIServer
from django.http import HttpRequest, JsonResponse
from django.urls import path


def orders(request: HttpRequest) -> JsonResponse:
    caller = CALLERS.get(request.headers.get("Authorization", ""))
    if caller is None:
        return JsonResponse({"detail": "unauthorized"}, status=401)
    if request.method == "GET":
        return JsonResponse(total(caller))
    if request.method != "POST":
        return JsonResponse({"detail": "method not allowed"}, status=405)
    try:
        document = json.loads(request.body)
    except (ValueError, RecursionError):
        return JsonResponse({"detail": "no JSON"}, status=400)
    if not (isinstance(document, dict) and isinstance(document.get("quantity"), int) and "item" in document):
        return JsonResponse({"detail": "incomplete"}, status=422)
    time.sleep(float(request.headers.get("X-Slow", "0")))
    if "X-Fail" in request.headers:
        raise RuntimeError("it was told to fail")
    content = placed(caller)
    return JsonResponse(content, status=201, headers={"Location": f"/orders/{content['id']}"})


class Server(ThreadingMixIn, WSGIServer):
    """Django's own server, with a thread for each connection as `runserver` has it."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up."""


class Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1"],
        LOGGING_CONFIG=None,
        MIDDLEWARE=["idempotency_key.middleware.IdempotencyKeyMiddleware"],
        ROOT_URLCONF=(path("orders", orders),),
        SECRET_KEY="of a shop",
    )
    django.setup()
    with Server(("127.0.0.1", 0), Handler) as server:
        server.set_app(WSGIHandler())
        announce(server.server_port)
        server.serve_forever()
