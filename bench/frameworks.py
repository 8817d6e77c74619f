"""`python -m bench.frameworks`: the cost of protection in each framework, compared with the same route without it.

Every framework serves one application in a separate process, on a common server for it, with one worker: an unprotected
route and the same route protected, on a store in memory. There is no disk, so the figures show the cost of the
framework, its adapter and the engine. All take turns in short slices, round after round, and ratios are computed within
a round. Every response is checked for its status and for the marker of a replay.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench import clocks
from bench.figures import BenchError, Range
from bench.load import HOST, Lanes, Load
from bench.places import ROOT
from bench.rounds import request

PLACES = {
    "FastAPI, uvicorn": ("fastapi", "uvicorn"),
    "Starlette, uvicorn": ("starlette", "uvicorn"),
    "ASGI by path, uvicorn": ("asgi", "uvicorn"),
    "Litestar, uvicorn": ("litestar", "uvicorn"),
    "Django, gunicorn gthread": ("django", "gunicorn"),
    "Flask, gunicorn gthread": ("flask", "gunicorn"),
    "Flask, waitress": ("flask", "waitress"),
    "WSGI, waitress": ("wsgi", "waitress"),
}
"""The measured combinations: a framework, and its server."""
KINDS = ("unprotected", "new key", "replay")
THREADS = 16
_KNOWN = 64
_IDLE = 3600
"""Seconds that a connection may be idle during the turns of others."""
_GUNICORN = ("--worker-class", "gthread", "--workers", "1", "--keep-alive", str(_IDLE), "--log-level", "error")


# The applications, each with two equal routes.


def application(framework: str) -> Any:
    """The application of a framework."""
    from oncekey import INLINE, SINGLE_TENANT, Once  # noqa: PLC0415

    once: Once
    if framework == "django":
        from oncekey import django  # noqa: PLC0415

        once = django.Once("memory:", tenant=SINGLE_TENANT, survey=False)
    else:
        once = Once("memory:", survey=False)
    make = {
        "fastapi": _fastapi,
        "starlette": _starlette,
        "asgi": _by_path,
        "litestar": _litestar,
        "django": _django,
        "flask": _flask,
        "wsgi": _routed,
    }[framework]
    return make(once, once.protect(effects=INLINE, operation="order"))


def _fastapi(once: Any, protect: Any) -> Any:
    from fastapi import FastAPI  # noqa: PLC0415

    from oncekey import SINGLE_TENANT  # noqa: PLC0415

    app = FastAPI(lifespan=once.lifespan)

    async def order(body: dict[str, Any]) -> dict[str, str]:  # noqa: ARG001  (it is read, and that is all)
        return {"status": "created"}

    app.post("/unprotected", status_code=201)(order)
    app.post("/protected", status_code=201)(protect(order))
    once.install(app, tenant=SINGLE_TENANT)
    return app


def _starlette(once: Any, protect: Any) -> Any:
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.requests import Request  # noqa: PLC0415
    from starlette.responses import JSONResponse  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    from oncekey import SINGLE_TENANT  # noqa: PLC0415

    async def order(request: Request) -> JSONResponse:
        await request.json()
        return JSONResponse({"status": "created"}, 201)

    routes = [Route("/unprotected", order, methods=["POST"]), Route("/protected", protect(order), methods=["POST"])]
    app = Starlette(routes=routes, lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)
    return app


def _by_path(once: Any, _: Any) -> Any:
    from oncekey import INLINE  # noqa: PLC0415

    enrol = {"POST /protected": once.by_path(effects=INLINE, operation="order")}
    return once.asgi(_asgi, tenant=lambda _: "acme", enrol=enrol)


async def _asgi(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        continue
    headers = [(b"content-type", b"application/json"), (b"content-length", b"20")]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"status":"created"}'})


def _litestar(once: Any, protect: Any) -> Any:
    from litestar import Litestar, post  # noqa: PLC0415

    from oncekey import SINGLE_TENANT  # noqa: PLC0415
    from oncekey.litestar import OncePlugin  # noqa: PLC0415

    async def order(data: dict[str, Any]) -> dict[str, str]:  # noqa: ARG001  (it is read, and that is all)
        return {"status": "created"}

    handlers = [post("/unprotected")(order), post("/protected")(protect(order))]
    return Litestar(handlers, plugins=[OncePlugin(once, tenant=SINGLE_TENANT)], logging_config=None)


def _django(once: Any, protect: Any) -> Any:
    from django.conf import settings  # noqa: PLC0415
    from django.core.wsgi import get_wsgi_application  # noqa: PLC0415
    from django.http import HttpRequest, JsonResponse  # noqa: PLC0415
    from django.urls import path  # noqa: PLC0415

    def order(request: HttpRequest) -> JsonResponse:
        json.loads(request.body)
        return JsonResponse({"status": "created"}, status=201)

    globals()["once_of_django"] = once  # a setting contains its path
    settings.configure(
        ALLOWED_HOSTS=[HOST],
        ROOT_URLCONF=(path("unprotected", order), path("protected", protect(order))),
        MIDDLEWARE=["oncekey.django.Middleware"],
        ONCEKEY=f"{__name__}.once_of_django",
    )
    return get_wsgi_application()


def _flask(once: Any, protect: Any) -> Any:
    import flask  # noqa: PLC0415

    from oncekey import SINGLE_TENANT  # noqa: PLC0415

    app = flask.Flask("bench")

    def order() -> Any:
        flask.request.get_json()
        return {"status": "created"}, 201

    app.add_url_rule("/unprotected", "unprotected", order, methods=["POST"])
    app.add_url_rule("/protected", "protected", protect(order), methods=["POST"])
    return once.wsgi(app, tenant=SINGLE_TENANT)


def _routed(once: Any, protect: Any) -> Any:
    from oncekey import SINGLE_TENANT  # noqa: PLC0415

    protected = protect(_wsgi)

    def routed(environ: Any, start_response: Any) -> Any:
        chosen = protected if environ["PATH_INFO"] == "/protected" else _wsgi
        return chosen(environ, start_response)

    return once.wsgi(routed, tenant=SINGLE_TENANT)


def _wsgi(environ: Any, start_response: Any) -> Any:
    environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    start_response("201 Created", [("Content-Type", "application/json"), ("Content-Length", "20")])
    return [b'{"status":"created"}']


def __getattr__(name: str) -> Any:
    if name != "app":  # what gunicorn looks up
        raise AttributeError(name)
    return application(os.environ["BENCH_FRAMEWORK"])


def serve(framework: str, server: str, listening: socket.socket) -> None:
    """Serve until the process is killed."""
    app = application(framework)
    match server:
        case "uvicorn":
            import uvicorn  # noqa: PLC0415

            uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=_IDLE)).run([listening])
        case _:
            import waitress  # noqa: PLC0415

            waitress.create_server(app, sockets=[listening], threads=THREADS, channel_timeout=_IDLE).run()


# Measuring.


@dataclass(frozen=True)
class Figure:
    """One slice: requests per second, and the server's processor time per request."""

    rate: float
    cpu_us: float | None


class Place:
    """A running server, and connections to it."""

    def __init__(self, pid: int, port: int, said: Any) -> None:
        self.pid, self.port, self._said = pid, port, said
        self._lanes: Lanes | None = None
        self._known = [uuid.uuid4().hex for _ in range(_KNOWN)]
        self._again = itertools.cycle(self._known)

    async def open(self, connections: int) -> None:
        """Connect, and execute the keys that will be replayed."""
        self._lanes = await Lanes.open(self.port, connections)
        keys = iter(self._known)

        def first() -> bytes | None:
            key = next(keys, None)
            return None if key is None else request("/protected", key)

        await self._fire(Load(first, b"201", seconds=60.0))

    async def measure(self, kind: str, seconds: float) -> Figure:
        """One slice of load."""
        mark = b"\r\nidempotent-replayed: true"
        match kind:
            case "unprotected":
                load = Load(lambda: request("/unprotected", None), b"201", unmarked=mark, seconds=seconds)
            case "new key":
                load = Load(lambda: request("/protected", uuid.uuid4().hex), b"201", unmarked=mark, seconds=seconds)
            case _:
                again = self._again
                load = Load(lambda: request("/protected", next(again)), b"201", marker=mark, seconds=seconds)
        before = clocks.seconds_of(self.pid)
        volley = await self._fire(load)
        after = clocks.seconds_of(self.pid)
        spent = None if before is None or after is None else (after - before) / volley.count * 1e6
        return Figure(volley.count / volley.seconds, spent)

    async def close(self) -> None:
        if self._lanes is not None:
            await self._lanes.close()

    async def _fire(self, load: Load) -> Any:
        assert self._lanes is not None
        volley = await self._lanes.fire(load)
        if volley.wrong or not volley.count:
            self._said.seek(0)
            raise BenchError(f"{volley.wrong or 'no answer'}\n{self._said.read().decode(errors='replace')[-2000:]}")
        return volley


@contextmanager
def served(framework: str, server: str) -> Iterator[Place]:
    """A framework in a separate process."""
    from harness.patience import wait_until  # noqa: PLC0415
    from harness.processes import children  # noqa: PLC0415

    with socket.create_server((HOST, 0), backlog=128) as listening, tempfile.TemporaryFile() as said:
        number = listening.fileno()
        command = [sys.executable, "-m", "bench.frameworks", "--serve", framework, server, str(number)]
        if server == "gunicorn":
            words = (*_GUNICORN, "--threads", str(THREADS), "--no-control-socket", "--bind", f"fd://{number}")
            command = [sys.executable, "-m", "gunicorn", *words, "bench.frameworks:app"]
        places = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment = {**os.environ, "PYTHONPATH": places, "BENCH_FRAMEWORK": framework}
        process = subprocess.Popen(
            command, env=environment, pass_fds=[number], stdout=said, stderr=said, start_new_session=True
        )
        try:
            pid = process.pid
            if server == "gunicorn":
                wait_until(lambda: children(process.pid) or process.poll() is not None, "gunicorn has no worker")
                pid = children(process.pid)[0]
            yield Place(pid, listening.getsockname()[1], said)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


Found = dict[str, dict[str, list[Figure]]]


async def run(names: list[str], rounds: int, seconds: float, connections: int) -> Found:
    """Every kind of request on every server, round after round."""
    found: Found = {name: {kind: [] for kind in KINDS} for name in names}
    with ExitStack() as stack:
        places = {name: stack.enter_context(served(*PLACES[name])) for name in names}
        for place in places.values():
            await place.open(connections)
            for kind in KINDS:
                await place.measure(kind, seconds / 4)  # fills caches
        for _ in range(rounds):
            for name, place in places.items():
                for kind in KINDS:
                    found[name][kind].append(await place.measure(kind, seconds))
        for place in places.values():
            await place.close()
    return found


def table(found: Found) -> str:
    """A line for each server: its rate without protection, and the shares of a new key and of a replay."""
    width = max(len(name) for name in found) + 2
    head = f"{'':{width}}{'unprotected':>12}  {'new key, rate':>20}  {'processor time':>20}"
    lines = [f"{head}  {'replay, rate':>20}  {'processor time':>20}"]
    for name, kinds in found.items():
        base = kinds["unprotected"]
        cells = f"{Range.of([one.rate for one in base]).median:>10.0f}/s"
        for kind in KINDS[1:]:
            pairs = list(zip(base, kinds[kind], strict=True))
            rates = Range.of([ours.rate / bare.rate for bare, ours in pairs])
            spent = [bare.cpu_us / ours.cpu_us for bare, ours in pairs if bare.cpu_us and ours.cpu_us]
            cells += f"  {_shown(rates):>20}  {_shown(Range.of(spent)) if spent else 'unknown':>20}"
        lines.append(f"{name:{width}}{cells}")
    return "\n".join(lines)


def _shown(one: Range) -> str:
    return f"{one.median:.2f} ({one.low:.2f}-{one.high:.2f})"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.frameworks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds for each kind of request, in each round")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--only", default="", help=f"some of: {'; '.join(PLACES)}", metavar="TEXT")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    if given.serve is not None:
        framework, server, number = given.serve
        serve(framework, server, socket.socket(fileno=int(number)))
        return
    names = [name for name in PLACES if given.only.lower() in name.lower()]
    if not names:
        parser.error(f"--only {given.only}: nothing matches")
    print(table(asyncio.run(run(names, given.rounds, given.seconds, given.connections))))
    print("Shares of the unprotected route: 1.00 means no cost, 0.50 twice the cost. Medians (lowest-highest round).")


if __name__ == "__main__":
    main()
