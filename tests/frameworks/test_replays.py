"""What a repeat hears: the first answer, byte for byte, and nothing of anybody else's request."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from frameworks.shop import KEY, Shop
from oncekey.core.model import INLINE, LOCAL, SECOND
from oncekey.core.policy import ErrorFormat, Flavor, Policy
from oncekey.engine.operation import Operation
from oncekey.testing.claims import ManualClock


def answering(response: Any, **options: Any) -> Shop:
    """A shop whose handler gives one answer."""
    shop = Shop(policy=options.pop("policy", None), clock=options.pop("clock", None))

    @shop.post(effects=LOCAL, **options)
    async def create(op: Operation) -> Response:
        shop.runs.append(1)
        answer: Response = response()
        return answer

    return shop


async def test_a_retry_replays_the_response_without_a_second_run() -> None:
    # R67, R87, R88, R95, R96, R98, R258
    shop = Shop()

    @shop.post(effects=LOCAL, status_code=201)
    async def create(op: Operation) -> dict[str, int]:
        op.connection.add("row")
        return {"orders": len(op.connection.rows)}

    first = await shop.send("/orders")
    again = [await shop.send("/orders") for _ in range(100)]
    assert (first.status, first.json(), first.header("idempotent-replayed")) == (201, {"orders": 1}, None)
    assert {(reply.status, reply.body, reply.replayed) for reply in again} == {(201, first.body, True)}
    assert shop.ledger.rows == ["row"]


@pytest.mark.parametrize(
    "body", [b'{"b":1e2,"a":"\\u0000"}', b"\x00\xff\xfe", b"", b'{ "spaces" : true }\n', "żółw".encode("utf-16")]
)
async def test_the_body_is_kept_byte_for_byte(body: bytes) -> None:
    # R89, C23
    shop = answering(lambda: Response(body, media_type="application/json"))
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (first.body, again.body, again.replayed) == (body, body, True)
    assert again.all("content-length") == [str(len(body))]


@pytest.mark.parametrize(
    "media", ["application/json", "application/json; charset=utf-8", 'text/plain; charset="ISO-8859-1"', "image/png"]
)
async def test_the_content_type_is_replayed_with_its_parameters(media: str) -> None:
    # R90; peers 16
    shop = answering(lambda: Response(b"x", headers={"content-type": media}))
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (first.header("content-type"), again.header("content-type"), again.replayed) == (media, media, True)


async def test_only_allowed_headers_are_replayed() -> None:
    # R90; peers 28: a field that was sent twice comes back twice; peers 30: cookies are one caller's
    headers = [
        (b"location", b"/orders/7"),
        (b"etag", b'"7"'),
        (b"content-language", b"en"),
        (b"content-language", b"pl"),
        (b"set-cookie", b"session=secret"),
        (b"x-request-id", b"42"),
        (b"date", b"Thu, 01 Jan 1970 00:00:00 GMT"),
        (b"connection", b"close"),
        (b"www-authenticate", b"Basic"),
    ]

    def answer() -> Response:
        response = JSONResponse({"id": 7}, status_code=201)
        response.raw_headers += headers
        return response

    shop = answering(answer)
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert first.header("set-cookie") == "session=secret"  # the first caller gets all of it
    assert again.header("location") == "/orders/7"
    assert again.header("etag") == '"7"'
    assert again.all("content-language") == ["en", "pl"]
    for name in ("set-cookie", "x-request-id", "date", "connection", "www-authenticate"):
        assert again.header(name) is None
    assert "secret" not in str(shop.ledger.record)


async def test_a_route_may_keep_more_headers() -> None:
    # R90
    shop = answering(
        lambda: Response(b"x", headers={"x-rate": "9", "x-other": "1"}), replay_headers=["content-type", "X-Rate"]
    )
    await shop.send("/orders")
    again = await shop.send("/orders")
    assert (again.header("x-rate"), again.header("x-other")) == ("9", None)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 303, 400, 402, 404, 409, 410, 422, 451])
async def test_the_status_code_is_replayed(status: int) -> None:
    # R88, R91
    shop = answering(lambda: Response(b"" if status == 204 else b"said", status_code=status))
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (first.status, again.status, again.body, again.replayed) == (status, status, first.body, True)
    assert len(again.all("content-length")) == (0 if status == 204 else 1)
    assert shop.runs == [1]


async def test_an_encoded_body_is_replayed_with_its_encoding() -> None:
    # apishape 1: the encoding is part of the body's meaning
    shop = answering(lambda: Response(b"\x1f\x8b...", headers={"content-encoding": "gzip"}))
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (again.header("content-encoding"), again.body) == ("gzip", first.body)


async def test_response_and_replay_have_the_expiry_header() -> None:
    # R164: equal to the row
    clock = ManualClock()
    shop = answering(lambda: Response(b"x"), clock=clock)
    first = await shop.send("/orders")
    clock.advance(3600 * SECOND)
    again = await shop.send("/orders")
    said = {parsedate_to_datetime(reply.header("idempotency-key-expires") or "") for reply in (first, again)}
    (moment,) = said
    assert int(moment.timestamp()) == shop.ledger.record["expires_at"] // SECOND


async def test_response_and_replay_echo_the_key() -> None:
    # R17
    shop = answering(lambda: Response(b"x"))
    for _ in range(2):
        assert (await shop.send("/orders")).all("idempotency-key") == [KEY]


async def test_oncekey_headers_replace_those_of_the_handler() -> None:
    # a handler that passes on what another service with keys answered
    theirs = {"idempotency-key": "theirs", "Idempotent-Replayed": "true", "Idempotency-Key-Expires": "never"}
    shop = answering(lambda: Response(b"x", headers=theirs))
    first, again = await shop.send("/orders"), await shop.send("/orders")
    assert (first.all("idempotency-key"), first.all("idempotent-replayed")) == ([KEY], [])
    assert len(first.all("idempotency-key-expires")) == 1
    assert (again.all("idempotency-key"), again.all("idempotent-replayed")) == ([KEY], ["true"])
    assert len(again.all("idempotency-key-expires")) == 1


async def test_a_replay_has_cache_control_no_store() -> None:
    shop = answering(lambda: Response(b"x"))
    await shop.send("/orders")
    assert (await shop.send("/orders")).header("cache-control") == "no-store"


async def test_a_replay_ignores_later_state_changes() -> None:
    # R93
    shop = Shop()
    orders: dict[int, str] = {}

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> dict[str, str]:
        orders[7] = "new"
        return {"state": orders[7]}

    first = await shop.send("/orders")
    orders[7] = "cancelled"
    assert (await shop.send("/orders")).body == first.body


async def test_a_record_of_an_older_shape_is_still_replayed() -> None:
    # R92
    shop = answering(lambda: Response(b"x", status_code=201))
    await shop.send("/orders")
    shop.ledger.record["response_schema"] = 0
    assert (await shop.send("/orders")).status == 201


# --------------------------------------------------------------------------------------- middleware around us


def wrapped(*middleware: Middleware) -> Shop:
    shop = Shop()
    for one in middleware:
        shop.app.add_middleware(one.cls, *one.args, **one.kwargs)  # type: ignore[arg-type]

    @shop.post(effects=INLINE)
    async def create() -> Response:
        shop.runs.append(1)
        return PlainTextResponse("a long answer " * 100)

    return shop


async def test_each_replay_is_compressed_for_its_client() -> None:
    # apishape 1, 9: an inner compression would replay gzip to a client that cannot read it
    shop = wrapped(Middleware(GZipMiddleware, minimum_size=10))
    encodings = []
    for accepts in ("gzip", "identity", "gzip", "identity"):
        reply = await shop.send("/orders", headers=[("Accept-Encoding", accepts)])
        encodings.append(reply.header("content-encoding"))
        assert reply.body.startswith(b"\x1f\x8b" if accepts == "gzip" else b"a long answer ")
    assert encodings == ["gzip", None, "gzip", None]
    assert shop.runs == [1]
    assert shop.ledger.record["response_body"].startswith(b"a long answer ")


async def test_middleware_added_before_install_stays_outside() -> None:
    # apishape 1: `install` comes last and still goes innermost
    shop = Shop(install=False)
    shop.app.add_middleware(GZipMiddleware, minimum_size=10)
    shop.once.install(shop.app, tenant=lambda _: "acme")

    @shop.post(effects=INLINE)
    async def create() -> Response:
        return PlainTextResponse("a long answer " * 100)

    await shop.once.start(shop.app)
    await shop.send("/orders", headers=[("Accept-Encoding", "gzip")])
    assert (await shop.send("/orders")).body.startswith(b"a long answer ")


async def test_each_replay_has_cors_headers_for_its_origin() -> None:
    # apishape 1, 9
    origins = ["https://a.example", "https://b.example"]
    shop = wrapped(Middleware(CORSMiddleware, allow_origins=origins, allow_credentials=True))
    told = []
    for origin in ("https://a.example", "https://b.example", "https://evil.example", None):
        reply = await shop.send("/orders", headers=[("Origin", origin)] if origin else [])
        told.append(reply.all("access-control-allow-origin"))
    assert told == [["https://a.example"], ["https://b.example"], [], []]
    assert shop.runs == [1]


async def test_middleware_header_changes_do_not_reach_the_record() -> None:
    # apishape 1: outer middleware appends to message["headers"]
    class Stamp:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def stamped(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"].append((b"x-stamp", b"1"))
                    message["headers"][:] = [pair for pair in message["headers"] if pair[0] != b"content-type"]
                await send(message)

            await self.app(scope, receive, stamped)

    shop = wrapped(Middleware(Stamp))
    for _ in range(3):
        reply = await shop.send("/orders")
        assert (reply.all("x-stamp"), reply.header("content-type")) == (["1"], None)
    assert "text/plain" in str(shop.ledger.record["response_headers"])
    assert "x-stamp" not in str(shop.ledger.record["response_headers"])


async def test_middleware_sees_the_stored_status_of_a_replay() -> None:
    # apishape 1: inner logs and metrics see the truth
    seen: list[int] = []
    shop = Shop()

    class Watch:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def watched(message: Any) -> None:
                if message["type"] == "http.response.start":
                    seen.append(message["status"])
                await send(message)

            await self.app(scope, receive, watched)

    shop.app.add_middleware(Watch)

    @shop.post(effects=INLINE, status_code=201)
    async def create() -> str:
        return "done"

    for _ in range(2):
        await shop.send("/orders")
    assert seen == [201, 201]


# -------------------------------------------------------------------------------------------- the forms of errors


@pytest.mark.parametrize(
    ("policy", "media", "says"),
    [
        (Policy(), "application/problem+json", "code"),
        (Policy(error_format=ErrorFormat.FAULT), "application/json", "fault"),
        (Policy(error_format=ErrorFormat.CODE), "application/json", "code"),
        (Policy(flavor=Flavor.STRIPE), "application/problem+json", "error"),
    ],
)
async def test_refusals_follow_the_error_format_of_the_policy(policy: Policy, media: str, says: str) -> None:
    # R99, R232, C7, C9
    shop = Shop(policy=policy)

    @shop.post(effects=INLINE)
    async def create(request: Request) -> str:
        return "done"

    await shop.send("/orders", b"1")
    reply = await shop.send("/orders", b"2")
    assert reply.status == (400 if policy.flavor is Flavor.STRIPE else 422)
    assert reply.header("content-type") == media
    assert says in reply.json()
    if says == "fault":
        assert len(reply.json()["fault"]["faultId"]) == 32


async def test_every_class_of_refusal_has_its_own_status_and_code() -> None:
    # R99: never all 500 and never all 409
    shop = Shop(policy=Policy(max_request_bytes=10))

    @shop.post(effects=INLINE)
    async def create(request: Request) -> str:
        if (await request.body()) == b"doubt":
            raise RuntimeError
        return "done"

    await shop.send("/orders", b"1")
    await shop.send("/orders", b"doubt", key="key-of-an-unknown-1")
    replies = [
        await shop.send("/orders", b"1", key=None),
        await shop.send("/orders", b"1", key="bad"),
        await shop.send("/orders", b"2"),
        await shop.send("/orders", b"12345678901"),
        await shop.send("/orders", b"doubt", key="key-of-an-unknown-1"),
        await shop.send("/idempotency-keys/nobody-knows-this-one", method="GET", key=None),
    ]
    shop.ledger.dead = True
    replies.append(await shop.send("/orders", b"1"))
    assert [reply.status for reply in replies] == [400, 400, 422, 413, 409, 404, 503]
    assert len({reply.code for reply in replies}) == 7
    assert all(KEY.encode() not in reply.body for reply in replies)
