"""`once.asgi` around an application of no framework, in a process that cannot import Starlette or FastAPI."""

from __future__ import annotations

import json
import subprocess
import sys

from harness.patience import PATIENCE

PROGRAM = """
import asyncio, json, sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"starlette", "fastapi"}:
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Blocked())
from oncekey import INLINE, Once

once, runs = Once("memory:"), []


async def shop(scope, receive, send):
    assert scope["type"] == "http"
    runs.append(scope["path"])
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"made"})


orders = once.by_path(effects=INLINE, operation="orders")
app = once.asgi(shop, tenant=lambda _: "acme", enrol={"POST /orders": orders})


async def post():
    parts, ended = [{"type": "http.request", "body": b"{}", "more_body": False}], asyncio.Event()
    headers = [(b"idempotency-key", b"8e03978e-40d5-43dd-bc93-6894a57f9324"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/orders", "query_string": b"", "headers": headers}
    said = []

    async def receive():
        if not parts:
            await ended.wait()
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message):
        said.append(message)

    await app(scope, receive, send)
    replayed = {name.lower(): value for name, value in said[0]["headers"]}.get(b"idempotent-replayed", b"")
    return said[0]["status"], replayed.decode()


async def serve():
    asked, told = asyncio.Queue(), asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan", "state": {}}, asked.get, told.put))
    await asked.put({"type": "lifespan.startup"})
    assert (await told.get())["type"] == "lifespan.startup.complete"
    said = [await post(), await post()]
    await asked.put({"type": "lifespan.shutdown"})
    assert (await told.get())["type"] == "lifespan.shutdown.complete"
    await life
    return said


said = asyncio.run(serve())
loaded = [name for name in sys.modules if name.partition(".")[0] in {"starlette", "fastapi"}]
print(json.dumps({"said": said, "runs": runs, "loaded": loaded}))
"""


def test_once_asgi_works_without_starlette_installed() -> None:
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"said": [[201, ""], [201, "true"]], "runs": ["/orders"], "loaded": []}
