"""Which requests need a key, which may have one, and in which order a request is judged (R77 in part)."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from frameworks.shop import KEY, Shop, new_key
from oncekey.canonical.fingerprint import Selection
from oncekey.core.errors import ConfigurationError
from oncekey.core.keys import key_digest
from oncekey.core.model import INLINE, LOCAL
from oncekey.core.policy import KeyCheck, Policy
from oncekey.core.scope import BindTo
from oncekey.engine.operation import Operation, SyncOperation


class OrderIn(BaseModel):
    """What is ordered."""

    amount: int


def ordering(effects: Any = LOCAL, *, policy: Policy | None = None, **options: Any) -> Shop:
    shop = Shop(policy=policy)

    @shop.post(effects=effects, status_code=201, **options)
    async def create(order: OrderIn, op: Operation) -> dict[str, Any]:
        shop.runs.append(order.amount)
        if effects is LOCAL:
            op.connection.add(order.amount)
        return {"n": len(shop.runs), "key": op.key}

    return shop


# --------------------------------------------------------------------------------------------- with and without


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_missing_key_is_refused_before_anything_happens(effects: Any) -> None:
    # R11, R248
    shop = ordering(effects)
    reply = await shop.send("/orders", {"amount": 1}, key=None)
    assert (reply.status, reply.code) == (400, "idempotency_key_missing")
    assert reply.header("content-type") == "application/problem+json"
    assert reply.header("link") == '</idempotency#key-missing>; rel="describedby"; type="text/html"'
    assert (shop.runs, shop.ledger.rows, shop.ledger.records, shop.ledger.log) == ([], [], [], [])


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_request_without_an_optional_key_stores_nothing(effects: Any) -> None:
    # R2, R12: no key is invented
    shop = ordering(effects, require_key=False)
    replies = [await shop.send("/orders", {"amount": 1}, key=None) for _ in range(2)]
    assert [(reply.status, reply.json()["key"]) for reply in replies] == [(201, None), (201, None)]
    assert all(reply.header("idempotency-key") is None for reply in replies)
    assert (shop.runs, shop.ledger.records) == ([1, 1], [])
    assert len(shop.ledger.rows) == (2 if effects is LOCAL else 0)
    keyed = [await shop.send("/orders", {"amount": 1}) for _ in range(2)]
    assert [reply.replayed for reply in keyed] == [False, True]


@pytest.mark.parametrize(
    "line", ["", " ", '""', '"   "', "short", "a" * 256, "not a key!!!!!!!!!!", "key-0000000000000001,b"]
)
async def test_a_malformed_optional_key_is_rejected(line: str) -> None:
    # R7, R8, R9, R10: also where a key is optional
    shop = ordering(require_key=False)
    reply = await shop.send("/orders", {"amount": 1}, key=line)
    assert (reply.status, reply.code) == (400, "idempotency_key_malformed")
    assert (shop.runs, shop.ledger.records) == ([], [])


async def test_two_key_headers_are_rejected() -> None:
    # R7
    shop = ordering(require_key=False)
    two = [("Idempotency-Key", new_key()), ("Idempotency-Key", new_key())]
    reply = await shop.send("/orders", {"amount": 1}, key=None, headers=two)
    assert (reply.status, reply.code, shop.runs) == (400, "idempotency_key_malformed", [])
    assert "more than once" in reply.json()["detail"]
    assert reply.header("idempotency-key") is None


@pytest.mark.parametrize("spelled", [f'"{KEY}"', f'"{KEY}";x=1', f"  {KEY} "])
async def test_quoted_and_bare_spellings_are_one_key(spelled: str) -> None:
    # R5, R6, R17
    shop = ordering()
    first = await shop.send("/orders", {"amount": 1}, key=KEY)
    again = await shop.send("/orders", {"amount": 1}, key=spelled)
    assert (first.header("idempotency-key"), again.header("idempotency-key")) == (KEY, spelled)
    assert again.replayed


async def test_keys_are_case_sensitive() -> None:
    # R3
    shop = ordering()
    for key in ("AAAAAAAAAAAAAAAAAAAA", "aaaaaaaaaaaaaaaaaaaa"):
        assert not (await shop.send("/orders", {"amount": 1}, key=key)).replayed
    assert shop.runs == [1, 1]


async def test_two_keys_with_one_body_are_two_operations() -> None:
    # R21, R22; peers 25
    shop = ordering()
    replies = [await shop.send("/orders", {"amount": 1}, key=new_key()) for _ in range(3)]
    assert [reply.status for reply in replies] == [201, 201, 201]
    assert shop.runs == [1, 1, 1]


async def test_a_key_with_personal_data_warns_without_logging_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # R18, R195
    shop = ordering()
    assert (await shop.send("/orders", {"amount": 1}, key="alice@example.com-1234567")).status == 201
    assert "looks like personal data" in caplog.text
    assert "alice" not in caplog.text
    strict = ordering(policy=Policy(pii_check=KeyCheck.REJECT))
    reply = await strict.send("/orders", {"amount": 1}, key="alice@example.com-1234567")
    assert (reply.status, reply.code, strict.runs) == (400, "idempotency_key_malformed", [])


async def test_a_guessable_key_is_logged_or_rejected(caplog: pytest.LogCaptureFixture) -> None:
    # R269: by policy; the security log has its digest only
    key = "a" * 20
    shop = ordering()
    assert (await shop.send("/orders", {"amount": 1}, key=key)).status == 201
    [line] = [record for record in caplog.records if record.name == "oncekey.security"]
    assert f"can be guessed (digest {key_digest(key)})" in line.getMessage()
    assert key not in caplog.text
    caplog.clear()
    assert (await ordering(policy=Policy(guessable_check="off")).send("/orders", {"amount": 1}, key=key)).status == 201
    assert "can be guessed" not in caplog.text
    strict = ordering(policy=Policy(guessable_check="reject"))
    reply = await strict.send("/orders", {"amount": 1}, key=key)
    assert (reply.status, reply.code, strict.runs) == (400, "idempotency_key_malformed", [])


# ------------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
@pytest.mark.parametrize("key", [None, KEY, "bad"])
async def test_unprotected_methods_ignore_keys(method: str, key: str | None) -> None:
    # R14, R262
    shop = Shop()

    @shop.app.api_route("/orders", methods=[method])
    async def plain() -> str:
        shop.runs.append(1)
        return "done"

    replies = [await shop.send("/orders", method=method, key=key) for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 200]
    assert (shop.runs, shop.ledger.records, shop.ledger.log) == ([1, 1], [], [])


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
async def test_a_protected_handler_ignores_keys_on_get(effects: Any) -> None:
    # R14
    shop = Shop()

    @shop.app.api_route("/orders", methods=["GET", "POST"])
    @shop.once.protect(effects=effects)
    async def both(op: Operation) -> str:
        shop.runs.append(op.key)
        if effects is LOCAL:
            op.connection.add("row")
        return "done"

    replies = [await shop.send("/orders", method="GET") for _ in range(2)]
    assert [(reply.status, reply.header("idempotency-key")) for reply in replies] == [(200, None), (200, None)]
    assert (await shop.send("/orders", method="GET", key=None)).status == 200
    assert (shop.runs, shop.ledger.records) == ([None] * 3, [])
    assert len(shop.ledger.rows) == (3 if effects is LOCAL else 0)
    assert (await shop.send("/orders")).status == 200
    assert len(shop.ledger.records) == 1


@pytest.mark.parametrize("effects", [LOCAL, INLINE])
@pytest.mark.parametrize("method", ["PATCH", "PUT", "DELETE"])
async def test_protection_applies_to_put_patch_and_delete(effects: Any, method: str) -> None:
    # R15, C27: the decorator is the opt-in; a header alone is none
    shop = Shop()

    @shop.app.api_route("/orders/7", methods=[method])
    @shop.once.protect(effects=effects)
    async def change(op: Operation) -> int:
        shop.runs.append(op.key)
        return len(shop.runs)

    await shop.once.start(shop.app)
    replies = [await shop.send("/orders/7", method=method) for _ in range(2)]
    assert [(reply.body, reply.replayed) for reply in replies] == [(b"1", False), (b"1", True)]
    assert (await shop.send("/orders/7", method=method, key=None)).code == "idempotency_key_missing"
    assert (await shop.send("/orders/7", {"other": 1}, method=method)).status == 422
    assert shop.runs == [KEY]


@pytest.mark.parametrize("methods", [["GET"], ["GET", "OPTIONS"]])
async def test_protecting_a_get_only_route_is_rejected_at_startup(methods: list[str]) -> None:
    # R14: a protection that can never protect is a mistake
    shop = Shop()

    @shop.app.api_route("/orders", methods=methods)
    @shop.once.protect(effects=INLINE, operation="list_orders")
    async def listing() -> None: ...

    with pytest.raises(ConfigurationError, match=r"list_orders is served at /orders by GET.* only, where a key has no"):
        await shop.once.start(shop.app)


async def test_unprotected_routes_pass_through_untouched() -> None:
    # R13: the key is ignored, whatever it is, and nothing is stored
    shop = Shop()

    @shop.app.post("/search")
    async def search(request: Request) -> int:
        shop.runs.append(1)
        return len(await request.body())

    large = b"x" * 3_000_000
    for key in (KEY, "bad", None):
        caller = shop.caller("/search", [large[:1_000_000], large[1_000_000:]], key=key)
        assert (await caller.run()).body == b"3000000"
    assert (shop.runs, shop.ledger.log) == ([1, 1, 1], [])


# ------------------------------------------------------------------------------------- whose key it is, what for


async def test_equal_keys_of_two_tenants_are_separate() -> None:
    # R20, R25, R27, R243, R257; peers 24
    shop = ordering()
    mine = await shop.send("/orders", {"amount": 1})
    theirs = await shop.send("/orders", {"amount": 1}, headers=[("X-Tenant", "globex")])
    assert (mine.json()["n"], theirs.json()["n"], theirs.replayed) == (1, 2, False)
    other = await shop.send("/orders", {"amount": 9}, headers=[("X-Tenant", "globex")])
    assert other.status == 422


async def test_reusing_a_key_at_another_endpoint_returns_422() -> None:
    # R26; peers 24
    shop = Shop()

    @shop.post("/orders", effects=INLINE)
    async def order(body: dict[str, int]) -> str:
        return "order"

    @shop.post("/payments", effects=INLINE)
    async def payment(body: dict[str, int]) -> str:
        shop.runs.append(1)
        return "payment"

    await shop.send("/orders", {"amount": 1})
    reply = await shop.send("/payments", {"amount": 1})
    assert (reply.status, reply.code, shop.runs) == (422, "idempotency_key_reused_with_different_payload", [])
    assert b"order" not in reply.body.replace(b"idempotency", b"")


async def test_a_tenant_function_may_include_the_path() -> None:
    # R24, R26: then the same key at two endpoints is two keys
    shop = Shop(tenant=lambda request: f"{request.headers['x-account']} {request.url.path}")

    @shop.post("/orders", effects=INLINE)
    async def order(body: dict[str, int]) -> str:
        return "order"

    @shop.post("/payments", effects=INLINE)
    async def payment(body: dict[str, int]) -> str:
        return "payment"

    account = [("X-Account", "acme")]
    assert (await shop.send("/orders", {"n": 1}, headers=account)).json() == "order"
    assert (await shop.send("/payments", {"n": 1}, headers=account)).json() == "payment"
    assert (await shop.send("/orders", {"n": 1}, headers=account)).replayed


async def test_path_query_and_body_do_not_change_the_tenant() -> None:
    # R25
    shop = Shop()

    @shop.post("/{tenant}/orders", effects=INLINE)
    async def create(tenant: str, body: dict[str, str]) -> str:
        return "done"

    await shop.send("/globex/orders?tenant=globex", {"tenant": "globex"})
    assert shop.ledger.record["scope"].endswith("4:acme")


@pytest.mark.parametrize(
    ("bind_to", "replayed"), [(BindTo.TENANT, True), (BindTo.PRINCIPAL, False), (BindTo.TOKEN, False)]
)
async def test_bind_to_decides_which_callers_share_a_key(bind_to: BindTo, replayed: bool) -> None:
    # R24, R28, R244
    shop = Shop(policy=Policy(bind_to=bind_to), principal=lambda request: request.headers["x-user"])

    @shop.post(effects=INLINE)
    async def create() -> int:
        shop.runs.append(1)
        return len(shop.runs)

    for user in ("ann", "bob"):
        headers = [("X-User", user), ("Authorization", f"Bearer {user}")]
        reply = await shop.send("/orders", headers=headers)
    assert reply.replayed is replayed


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (b'{"a":1,"b":2}', b'{ "b" : 2.0, "a" : 1 }', 201),  # R34, R35
        (b'{"a":{"x":1,"y":[1,2]}}', b'{"a":{"y":[1,2],"x":1}}', 201),
        (b'{"a":[1,2]}', b'{"a":[2,1]}', 422),
        (b'{"a":"x|y","b":"z"}', b'{"a":"x","b":"y|z"}', 422),  # R36
        (b'{"a":9007199254740992}', b'{"a":9007199254740993}', 422),  # R40; peers 28
        (b'{"a":1}', b'{"a":2}', 422),  # R37
    ],
)
async def test_equivalent_json_bodies_have_one_fingerprint(first: bytes, second: bytes, status: int) -> None:
    # R37, R242
    shop = Shop()

    @shop.post(effects=INLINE, status_code=201)
    async def create(body: dict[str, Any]) -> str:
        shop.runs.append(1)
        return "done"

    json = [("Content-Type", "application/json")]
    assert (await shop.send("/orders", first, headers=json)).status == 201
    assert (await shop.send("/orders", second, headers=json)).status == status
    assert shop.runs == [1]
    assert (await shop.send("/orders", first, headers=json)).replayed


@pytest.mark.parametrize(
    "body", [b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":"\\ud800"}', b"[" * 200 + b"]" * 200, b'{"a":"\xff"}']
)
async def test_ambiguous_json_is_rejected_before_the_claim(body: bytes) -> None:
    # R40; peers 28
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create(request: Request) -> str:
        shop.runs.append(1)
        return "done"

    reply = await shop.send("/orders", body, headers=[("Content-Type", "application/json; charset=utf-8")])
    assert (reply.status, reply.code, shop.runs) == (400, "idempotency_body_invalid", [])
    assert shop.ledger.log == []


async def test_a_different_query_is_a_different_request() -> None:
    # R39
    shop = ordering()
    await shop.send("/orders?x=1", {"amount": 1})
    assert (await shop.send("/orders?x=2", {"amount": 1})).status == 422
    assert (await shop.send("/orders?x=1", {"amount": 1})).replayed


async def test_a_route_may_customize_its_fingerprint() -> None:
    # R39
    shop = Shop()

    @shop.post("/some", effects=INLINE, selection=Selection(exclude=("client_ts",)))
    async def some(body: dict[str, int]) -> str:
        return "done"

    @shop.post("/custom", effects=INLINE, fingerprint=lambda request: {"size": len(request.body)})
    async def custom(body: dict[str, int]) -> str:
        return "done"

    await shop.send("/some", {"amount": 1, "client_ts": 1})
    assert (await shop.send("/some", {"amount": 1, "client_ts": 2})).replayed
    assert (await shop.send("/some", {"amount": 2, "client_ts": 1})).status == 422
    await shop.send("/custom", {"amount": 1}, key=new_key() + "c")
    custom_key = new_key()
    await shop.send("/custom", {"amount": 1}, key=custom_key)
    assert (await shop.send("/custom", {"amount": 2}, key=custom_key)).replayed
    assert (await shop.send("/custom", {"amount": 22}, key=custom_key)).status == 422


@pytest.mark.parametrize("media", ["application/x-www-form-urlencoded", "application/octet-stream", "text/plain", None])
async def test_non_json_bodies_are_compared_byte_by_byte(media: str | None) -> None:
    # R41
    shop = Shop()

    @shop.post(effects=INLINE)
    async def create(request: Request) -> int:
        shop.runs.append(1)
        return len(await request.body())

    headers = [] if media is None else [("Content-Type", media)]
    await shop.send("/orders", b"step=debit&step=credit", headers=headers)
    assert (await shop.send("/orders", b"step=debit&step=credit", headers=headers)).replayed
    assert (await shop.send("/orders", b"step=credit&step=debit", headers=headers)).status == 422
    assert shop.runs == [1]


async def test_responses_and_logs_never_show_a_fingerprint(caplog: pytest.LogCaptureFixture) -> None:
    # R42
    shop = ordering()
    caplog.set_level(0)
    replies = [
        await shop.send("/orders", {"amount": 1}),
        await shop.send("/orders", {"amount": 1}),
        await shop.send("/orders", {"amount": 2}),
        await shop.send(f"/idempotency-keys/{KEY}", method="GET", key=None),
    ]
    mark = shop.ledger.record["fingerprint"]
    shown = caplog.text + str([(reply.lines, reply.body) for reply in replies])
    assert mark.rpartition(":")[2] not in shown


async def test_a_body_over_the_limit_is_rejected() -> None:
    # peers 12: an oversize request is 413, not a bypass
    shop = Shop(policy=Policy(max_request_bytes=100))

    @shop.post(effects=INLINE, require_key=False)
    async def create(request: Request) -> str:
        shop.runs.append(1)
        return "done"

    for body in (b"x" * 101, [b"x" * 60, b"x" * 60], [b"x" * 60, b"x" * 60, b"x" * 1_000_000]):
        reply = await shop.send("/orders", body)
        assert (reply.status, reply.code) == (413, "idempotency_body_too_large")
    assert (shop.runs, shop.ledger.log) == ([], [])
    assert (await shop.send("/orders", b"x" * 100)).status == 200


async def test_a_route_may_raise_its_body_limit() -> None:
    shop = Shop(policy=Policy(max_request_bytes=100))

    @shop.post("/large", effects=INLINE, max_request_bytes=1000)
    async def large(request: Request) -> str:
        return "done"

    @shop.post("/small", effects=INLINE)
    async def small(request: Request) -> str:
        return "done"

    assert (await shop.send("/large", b"x" * 1000)).status == 200
    assert (await shop.send("/small", b"x" * 101, key=new_key())).status == 413


# ---------------------------------------------------------------------------------------------- in which order


def authenticate(request: Request) -> None:
    if "x-token" not in request.headers:
        raise HTTPException(401, "who are you?")
    request.state.tenant = request.headers["x-token"]


def ordered_shop() -> Shop:
    """A shop with authentication as a dependency, and a handler that counts."""
    shop = Shop(tenant=lambda request: request.state.tenant)

    @shop.post(effects=LOCAL, status_code=201)
    async def create(order: OrderIn, _: Annotated[None, Depends(authenticate)], op: Operation) -> int:
        shop.runs.append(order.amount)
        return len(shop.runs)

    return shop


TOKEN = ("X-Token", "acme")


@pytest.mark.parametrize(
    ("why", "headers", "key", "body", "answer"),
    [
        ("authenticate", [], KEY, {"amount": 1}, (401, None)),
        ("authenticate, before the key", [], None, {"amount": 1}, (401, None)),
        ("authenticate, before the key's form", [], "bad", {"amount": 1}, (401, None)),
        ("authenticate, before the body's meaning", [], KEY, {"amount": "x"}, (401, None)),
        ("key present?", [TOKEN], None, {"amount": 1}, (400, "idempotency_key_missing")),
        ("key well-formed?", [TOKEN], "bad", {"amount": 1}, (400, "idempotency_key_malformed")),
        # The one deviation: FastAPI validates before any code of the route runs, ours included. So an invalid body
        # is 422 whatever the key is. Nothing was claimed, and nothing was executed.
        ("body valid?", [TOKEN], KEY, {"amount": "x"}, (422, None)),
        ("body valid? before the key", [TOKEN], None, {"amount": "x"}, (422, None)),
        ("body valid? before the key's form", [TOKEN], "bad", {"amount": "x"}, (422, None)),
        ("a body that is not JSON", [], KEY, b"{", (422, None)),
        ("new", [TOKEN], KEY, {"amount": 1}, (201, None)),
    ],
)
async def test_request_checks_run_in_a_fixed_order(
    why: str, headers: list[tuple[str, str]], key: str | None, body: Any, answer: tuple[int, str | None]
) -> None:
    # R20, R73, R77 in part, R186
    shop = ordered_shop()
    headers = [*headers, ("Content-Type", "application/json")] if isinstance(body, bytes) else headers
    reply = await shop.send("/orders", body, key=key, headers=headers)
    assert (reply.status, reply.code) == answer, why
    if answer != (201, None):
        assert (shop.runs, shop.ledger.log) == ([], [])


@pytest.mark.parametrize(
    ("state", "same", "status", "code"),
    [
        ("completed", True, 201, None),
        ("completed", False, 422, "idempotency_key_reused_with_different_payload"),
        ("in_progress", True, 409, "idempotency_key_in_progress"),
        ("in_progress", False, 422, "idempotency_key_reused_with_different_payload"),
        ("unknown", True, 409, "idempotency_outcome_unknown"),
        ("unknown", False, 422, "idempotency_key_reused_with_different_payload"),
        ("failed_retryable", True, 201, None),
        ("failed_retryable", False, 422, "idempotency_key_reused_with_different_payload"),
    ],
)
async def test_the_fingerprint_is_checked_before_the_record_state(
    state: str, same: bool, status: int, code: str | None
) -> None:
    # R38, R77 in part, C8: a request that is another one never takes a lock and learns nothing
    shop = ordered_shop()
    await shop.send("/orders", {"amount": 1}, headers=[TOKEN])
    line = shop.ledger.record
    if state != "completed":
        line.update({name: None for name in line if name.startswith("response_")}, outcome=None, state=state)
    if state == "in_progress":
        line.update(owner="somebody", lease_until=line["expires_at"])
    before = dict(line)
    reply = await shop.send("/orders", {"amount": 1 if same else 2}, headers=[TOKEN])
    assert (reply.status, reply.code) == (status, code)
    assert len(shop.runs) == (2 if same and state == "failed_retryable" else 1)
    if not same or state != "failed_retryable":
        assert shop.ledger.record == before


async def test_a_rejected_request_consumes_no_key() -> None:
    # R73: the corrected request may use the same key
    shop = ordered_shop()
    assert (await shop.send("/orders", {"amount": "x"}, headers=[TOKEN])).status == 422
    assert (await shop.send("/orders", {"amount": 1})).status == 401
    assert (await shop.send("/orders", {"amount": 1}, headers=[TOKEN])).status == 201


async def test_authorisation_comes_before_a_replay() -> None:
    # R186, R198: who may not, gets no stored answer either
    shop = Shop(tenant=lambda _: "acme")
    allowed = [True]

    def authorise() -> None:
        if not allowed[0]:
            raise HTTPException(403)

    @shop.post(effects=LOCAL, status_code=201)
    async def create(_: None = Depends(authorise)) -> str:
        return "secret"

    await shop.send("/orders")
    allowed[0] = False
    reply = await shop.send("/orders")
    assert (reply.status, b"secret" in reply.body) == (403, False)
    allowed[0] = True
    assert (await shop.send("/orders")).replayed


async def test_a_missing_request_attribute_in_tenant_is_reported() -> None:  # R25
    # wrong use gives the sentence that fixes it
    shop = Shop(tenant=lambda request: request.state.tenant)

    @shop.post(effects=INLINE)
    async def create() -> str:
        shop.runs.append(1)
        return "done"

    with pytest.raises(Exception, match="the tenant function found no 'tenant' on the request"):
        await shop.caller("/orders").run(raising=True)
    assert shop.runs == []


@pytest.mark.parametrize("nobody", ["", " ", None, 7])
async def test_an_empty_or_non_string_tenant_raises(nobody: Any) -> None:
    # R23: callers without one would share each other's answers
    shop = Shop(tenant=lambda _: nobody)

    @shop.post(effects=INLINE)
    async def create() -> str:
        shop.runs.append(1)
        return "done"

    with pytest.raises(Exception, match="must return a non-empty str for every caller"):
        await shop.caller("/orders").run(raising=True)
    assert shop.runs == []


async def test_a_tenant_function_may_be_async() -> None:
    async def tenant(request: Request) -> str:
        return request.headers["x-tenant"]

    shop = Shop(tenant=tenant)

    @shop.post(effects=INLINE)
    async def create() -> str:
        return "done"

    assert (await shop.send("/orders", headers=[("X-Tenant", "acme")])).status == 200
    assert shop.ledger.record["scope"].endswith("acme")


# ---------------------------------------------------------------------------------------- a LOCAL route without key


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("status", "way", "wish", "rows"),
    [
        (201, "returned", "", 1),
        (402, "returned", "", 1),
        (402, "raised", "", 0),
        (402, "raised", "keep", 1),
        (201, "returned", "rollback", 0),
        (429, "returned", "", 0),
        (503, "returned", "", 0),
        (500, "crashed", "keep", 0),
    ],
)
async def test_keyless_local_requests_commit_and_roll_back_like_keyed_ones(
    blocking: bool, status: int, way: str, wish: str, rows: int
) -> None:
    # R12, L6
    for key in (None, KEY):
        shop = Shop()

        def run(op: Any, shop: Shop) -> Any:
            op.connection.add("row")
            if wish:
                getattr(op, wish)()
            if way == "raised":
                raise HTTPException(status)
            if way == "crashed":
                raise RuntimeError
            return JSONResponse({}, status_code=status)

        _serve(shop, run, blocking=blocking)
        reply = await shop.send("/orders", key=key)
        assert (reply.status, len(shop.ledger.rows), shop.ledger.open) == (status, rows, 0)
        assert len(shop.ledger.records) == (0 if key is None else 1)


def _serve(shop: Shop, run: Any, *, blocking: bool) -> None:
    if blocking:

        @shop.post(effects=LOCAL, require_key=False)
        def create(op: SyncOperation) -> Any:
            return run(op, shop)

    else:

        @shop.post(effects=LOCAL, require_key=False)
        async def create(op: Operation) -> Any:
            return run(op, shop)


@pytest.mark.parametrize("blocking", [False, True])
async def test_two_keyless_requests_never_share_a_downstream_key(blocking: bool) -> None:
    # D1: the provider would take the second charge for a repeat of the first
    shop = Shop()
    if blocking:

        @shop.post(effects=INLINE, require_key=False)
        def create(op: SyncOperation) -> str:
            return op.downstream_key("charge") + op.downstream_key("charge")

    else:

        @shop.post(effects=INLINE, require_key=False)
        async def create(op: Operation) -> str:
            return op.downstream_key("charge") + op.downstream_key("charge")

    replies = [(await shop.send("/orders", key=None)).json() for _ in range(3)]
    assert len(set(replies)) == 3
    assert all(reply[: len(reply) // 2] == reply[len(reply) // 2 :] for reply in replies)
