"""An application whose views are enrolled by path, or decorated in Django: `python -m skins.spelled KIND SERVER FD`.

Every protected view answers with a number of its own, so a test sees which requests were executed.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from oncekey import INLINE, SINGLE_TENANT, Once

MARK = "execution"
PATHS = ("/jobs", "/größe", "/slash/", "/items/{n}", "/numbers/{n}", "/files/{n}")
"""The views of every application; `/numbers` takes whole numbers, and `/files` the rest of a path."""
_counter = itertools.count(1)


def execution() -> str:
    """What a view answers with."""
    return f"{MARK} {next(_counter)}."


def enrolled(once: Any, *more: str, rest: str = "{n}") -> dict[str, Any]:
    """All paths and some more. A framework's route is enrolled whole; of others a pattern says what is the rest."""
    patterns = [path.replace("/files/{n}", f"/files/{rest}") for path in PATHS]
    return {f"POST {path}": once.by_path(effects=INLINE, operation=path) for path in (*patterns, *more)}


def starlette() -> Any:
    from starlette.applications import Starlette

    return _starlette(Starlette)


def fastapi() -> Any:
    from fastapi import APIRouter, FastAPI

    router = APIRouter(prefix="/v1")

    @router.post("/jobs")
    async def run() -> str:
        return execution()

    def made(**options: Any) -> Any:
        app = FastAPI(**options)
        app.include_router(router)
        return app

    return _starlette(made, "/v1/jobs")


def _starlette(make: Callable[..., Any], *more: str) -> Any:
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    async def run(request: Request) -> PlainTextResponse:
        await request.body()
        return PlainTextResponse(execution(), 201)

    once = Once("memory:")
    kinds = {"/numbers/{n}": "/numbers/{n:int}", "/files/{n}": "/files/{n:path}"}
    routes = [Route(kinds.get(path, path), run, methods=["POST"]) for path in PATHS]
    mounted = Mount("/mounted", routes=[Route("/jobs", run, methods=["POST"])])
    app = make(routes=[*routes, mounted], lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT, enrol=enrolled(once, "/mounted/jobs", *more))
    return app


def rooted() -> Any:
    """FastAPI that strips a path of its own, wrapped from outside."""
    from fastapi import FastAPI
    from fastapi.responses import PlainTextResponse

    once, app = Once("memory:"), FastAPI(root_path="/api")
    for path in PATHS:

        async def run(n: str = "") -> PlainTextResponse:
            return PlainTextResponse(execution(), 201)

        app.add_api_route(path.replace("/files/{n}", "/files/{n:path}"), run, methods=["POST"])
    return once.asgi(app, tenant=lambda _: "acme", enrol=enrolled(once))


def litestar() -> Any:
    from litestar import Litestar, post

    from oncekey.litestar import OncePlugin

    once = Once("memory:")

    def routed(path: str) -> Any:
        if path.startswith("/numbers"):

            @post(path.replace("{n}", "{n:int}"))
            async def number(n: int) -> str:
                return execution()

            return number
        if "{n}" in path:

            @post(path.replace("/items/{n}", "/items/{n:str}").replace("/files/{n}", "/files/{n:path}"))
            async def item(n: str) -> str:
                return execution()

            return item

        @post(path)
        async def job() -> str:
            return execution()

        return job

    # Litestar writes paths without a slash at the end.
    enrol = {pattern.rstrip("/"): enrolment for pattern, enrolment in enrolled(once).items()}
    plugin = OncePlugin(once, tenant=SINGLE_TENANT, enrol=enrol)
    return Litestar([routed(path) for path in PATHS], plugins=[plugin], logging_config=None)


def _segments(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _serves(segments: list[str]) -> bool:
    """A router that ignores empty segments, as many do."""
    known = {"jobs": 1, "größe": 1, "slash": 1, "items": 2, "numbers": 2}
    first = segments[0] if segments else ""
    return first == "files" or known.get(first) == len(segments)


def asgi() -> Any:
    """An application that has no routes to be asked for, and looks at the path as it was sent."""

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        raw = scope["raw_path"].partition(b"?")[0].decode("latin-1")
        served = _serves([unquote(part) for part in _segments(raw)])
        await send({"type": "http.response.start", "status": 201 if served else 404, "headers": []})
        await send({"type": "http.response.body", "body": execution().encode() if served else b"none"})

    once = Once("memory:")
    return once.asgi(bare, tenant=lambda _: "acme", enrol=enrolled(once, rest="{n:path}"))


def wsgi() -> Any:
    def bare(environ: Any, start_response: Any) -> Any:
        path = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
        served = environ["REQUEST_METHOD"] == "POST" and _serves(_segments(path))
        start_response("201 Created" if served else "404 Not Found", [("Content-Type", "text/plain")])
        return [execution().encode() if served else b"none"]

    once = Once("memory:")
    return once.wsgi(bare, tenant=lambda _: "acme", enrol=enrolled(once, rest="{n:path}"))


def flask(*, strict: bool = True) -> Any:
    import flask as framework

    app = framework.Flask("spelled")
    app.url_map.strict_slashes = strict
    kinds = {"/items/{n}": "/items/<n>", "/numbers/{n}": "/numbers/<int:n>", "/files/{n}": "/files/<path:n>"}

    def run(n: str = "") -> Any:
        return execution(), 201

    for path in PATHS:
        app.add_url_rule(kinds.get(path, path), path, run, methods=["POST"])
    once = Once("memory:")
    app.add_url_rule("/decorated", view_func=once.protect(effects=INLINE, operation="decorated")(run), methods=["POST"])
    app.wsgi_app = overridden(app.wsgi_app)  # type: ignore[method-assign]
    return once.wsgi(app, tenant=lambda _: "acme", enrol=enrolled(once))


def overridden(app: Any) -> Any:
    """Middleware inside of ours that lets a header name the method, as Flask's documentation has it."""

    def rewritten(environ: Any, start_response: Any) -> Any:
        environ["REQUEST_METHOD"] = environ.get("HTTP_X_HTTP_METHOD_OVERRIDE", environ["REQUEST_METHOD"])
        return app(environ, start_response)

    return rewritten


def loose_flask() -> Any:
    return flask(strict=False)


once_of_django: Any = None
urlpatterns: list[Any] = []


def django() -> Any:
    from django.conf import settings
    from django.core.wsgi import get_wsgi_application
    from django.http import HttpResponse
    from django.urls import include, path, re_path
    from rest_framework.urlpatterns import format_suffix_patterns

    from oncekey.django import Once as DjangosOnce

    settings.configure(
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF="skins.spelled",
        APPEND_SLASH=False,
        MIDDLEWARE=["oncekey.django.Middleware"],
        ONCEKEY="skins.spelled.once_of_django",
    )

    once = globals()["once_of_django"] = DjangosOnce("memory:", tenant=SINGLE_TENANT)

    @once.protect(effects=INLINE)
    def run(request: Any, n: str = "", format: str = "") -> Any:  # noqa: A002
        return HttpResponse(execution(), status=201)

    kinds = {"/items/{n}": "/items/<str:n>", "/numbers/{n}": "/numbers/<int:n>", "/files/{n}": "/files/<path:n>"}
    urlpatterns[:] = [
        *format_suffix_patterns([path(kinds.get(one, one)[1:], run) for one in PATHS]),
        re_path(r"^old/(?P<n>\d+)/pay$", run),
        path("v1/", include([path("jobs/", run)])),
    ]
    return get_wsgi_application()


APPLICATIONS: dict[str, Callable[[], Any]] = {
    made.__name__: made for made in (starlette, fastapi, rooted, litestar, asgi, wsgi, flask, loose_flask, django)
}


def __getattr__(name: str) -> Any:
    if name != "app":  # what gunicorn asks for
        raise AttributeError(name)
    return APPLICATIONS[os.environ["SPELLED"]]()


def main() -> None:
    kind, server, number = sys.argv[1:]
    app, listening = APPLICATIONS[kind](), socket.socket(fileno=int(number))
    if server == "uvicorn":
        import uvicorn

        uvicorn.Server(uvicorn.Config(app, log_level="critical")).run([listening])
    else:
        import waitress

        waitress.create_server(app, sockets=[listening], threads=8).run()


if __name__ == "__main__":
    sys.modules["skins.spelled"] = sys.modules[__name__]  # which Django's settings name
    main()
