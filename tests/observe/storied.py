"""An application whose processes die and go on elsewhere, each writing its spans as lines into a file of its own.

`python -m observe.storied` makes three requests, each in a trace of its client's, and is killed in the last of
them; `oncekey worker --app observe.storied:once` does the rest. Both work in the same folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from opentelemetry import propagate
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from harness.asgi import Caller
from oncekey import SINGLE_TENANT, Executed, Message, Once, Question
from oncekey.core.model import INLINE, OUTBOX, PHASED
from oncekey.engine.operation import Operation
from oncekey.observe import OpenTelemetry

STORE = Path("story.db")
DYING = "ONCEKEY_TEST_DYING"
"""Set in the process that is killed."""


def line(span: Any) -> str:
    """A span as one line."""
    context, parent = span.context, span.parent
    return (
        json.dumps(
            {
                "name": span.name,
                "trace": f"{context.trace_id:032x}",
                "parent": None if parent is None else f"{parent.span_id:016x}",
                "links": [f"{one.context.trace_id:032x}" for one in span.links],
                "pid": os.getpid(),
            }
        )
        + "\n"
    )


provider = TracerProvider()
written = Path(f"spans-{os.getpid()}.jsonl").open("a", encoding="utf-8", buffering=1)  # noqa: SIM115  (until the end)
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=written, formatter=line)))
tracer = provider.get_tracer("application")

once = Once(f"sqlite:///{STORE}", migrate=True, observers=[OpenTelemetry(tracer_provider=provider)])


class Traced:
    """What an instrumentation of the framework does: a span for each request, in the trace that its client names."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = {name.decode(): value.decode() for name, value in scope["headers"]}
        with tracer.start_as_current_span(f"{scope['method']} {scope['path']}", propagate.extract(sent)):
            await self.app(scope, receive, send)


app = FastAPI(lifespan=once.lifespan)
app.add_middleware(Traced)


@app.post("/charges")
@once.protect(effects=INLINE, operation="charge")
async def charge(op: Operation[Any]) -> None:
    op.downstream_key("pay")
    raise TimeoutError


@app.post("/transfers", status_code=202)
@once.protect(effects=OUTBOX, operation="transfer")
async def transfer(op: Operation[Any]) -> None:
    op.defer("bank", {"amount": 1})


@app.post("/orders", status_code=201)
@once.protect(effects=PHASED, operation="order", complete=True)
async def order(op: Operation[Any]) -> dict[str, str]:
    drawn = await op.value("drawn", lambda: "o_1")
    if DYING in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"order": drawn}


@once.topic("bank")
def send_to_bank(message: Message) -> dict[str, int]:
    with tracer.start_as_current_span("at the bank", propagate.extract({"traceparent": message.traceparent})):
        return {"sent": message.payload["amount"]}


@once.resolver("charge", call="pay")
def ask(_: Question) -> Executed:
    return Executed({"paid": True})


once.install(app, tenant=SINGLE_TENANT)


async def main() -> None:
    """Make the requests."""
    async with once.lifespan(app):
        for number, path in enumerate(("/charges", "/transfers", "/orders"), 1):
            lines = {
                "Idempotency-Key": f"a-key-of-the-story-{number:08}",
                "traceparent": f"00-{number:032x}-00000000000000aa-01",
            }
            with suppress(TimeoutError):
                await Caller(app, "POST", path, headers=lines).run()


if __name__ == "__main__":
    asyncio.run(main())
