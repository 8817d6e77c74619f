"""The findings about other packages without the tester: for each clause a few plain requests that show the defect."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit

from harness.patience import PATIENCE

ORDER = b'{"item": "teapot", "quantity": 2}'
OTHER = b'{"item": "teapot", "quantity": 3}'
SLOWLY = "0.4"
TRIES = 5
BUSY = {409, 423, 425, 429, 503}
MARKERS = ("Idempotent-Replayed", "Idempotency-Replayed")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a shop sent."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class Client:
    """A caller of a shop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)

    def order(
        self, key: str | None, body: bytes = ORDER, *, caller: str | None = "alpha", query: str = "", **more: str
    ) -> Reply:
        """Send an order; `slow="0.4"` is the header X-Slow."""
        headers = {"Content-Type": "application/json", **{f"X-{name.title()}": value for name, value in more.items()}}
        headers |= {} if key is None else {"Idempotency-Key": key}
        headers |= {} if caller is None else {"Authorization": f"Bearer {caller}"}
        return self.send("POST", f"/orders{query}", body, headers)

    def total(self, caller: str = "alpha") -> int:
        """Count the orders of a caller."""
        return int(json.loads(self.send("GET", "/orders", b"", {"Authorization": f"Bearer {caller}"}).body)["total"])

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Reply:
        connection = HTTPConnection(self.host, self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def hang_up(self, key: str, *, sent: int, slow: str = "0") -> None:
        """Send an order without its last bytes, or all of it, and close the connection."""
        lines = (
            *("POST /orders HTTP/1.1", f"Host: {self.host}:{self.port}", "Content-Type: application/json"),
            *(f"Idempotency-Key: {key}", "Authorization: Bearer alpha", f"X-Slow: {slow}"),
            *(f"Content-Length: {len(ORDER)}", "", ""),
        )
        with socket.create_connection((self.host, self.port), timeout=PATIENCE) as connection:
            connection.sendall("\r\n".join(lines).encode() + ORDER[:sent])

    def at_once(self, *bodies: bytes, key: str) -> list[Reply]:
        """Send slow orders under one key at the same moment."""
        gate = threading.Barrier(len(bodies))

        def one(body: bytes) -> Reply:
            gate.wait(PATIENCE)
            return self.order(key, body, slow=SLOWLY)

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(one, bodies))

    def effects(self, act: Callable[[], object], caller: str = "alpha") -> int:
        """Count the orders that an act causes."""
        before = self.total(caller)
        act()
        return self.total(caller) - before


def fresh() -> str:
    return f'"{uuid.uuid4()}"'


Proof = Callable[[Client], bool]
PROOFS: dict[str, Proof] = {}
"""The clause -> whether a shop has the defect that the clause is about."""


def shows(*clauses: str) -> Callable[[Proof], Proof]:
    def kept(proof: Proof) -> Proof:
        PROOFS.update(dict.fromkeys(clauses, proof))
        return proof

    return kept


# Keys


@shows("keys.empty")
def one_empty_key_is_shared(shop: Client) -> bool:
    return any(shop.effects(lambda value=value: (shop.order(value), shop.order(value))) < 2 for value in ("", '""'))


@shows("keys.explained")
def a_missing_key_is_refused_without_a_link(shop: Client) -> bool:
    refusal = shop.order(None)
    return refusal.status == 400 and "link" not in refusal.headers and b"http" not in refusal.body


@shows("keys.two-spellings")
def quotes_make_another_key(shop: Client) -> bool:
    key = fresh()
    return shop.effects(lambda: (shop.order(key), shop.order(key.strip('"')))) > 1


@shows("keys.parameters")
def a_parameter_makes_another_key(shop: Client) -> bool:
    key = fresh()
    return shop.effects(lambda: (shop.order(key), shop.order(f"{key};a=1"))) > 1


# Replays


@shows("replays.status", "replays.many")
def a_retry_gets_another_status(shop: Client) -> bool:
    key = fresh()
    first = shop.order(key)
    return {shop.order(key).status for _ in range(TRIES)} != {first.status}


@shows("replays.headers")
def a_retry_gets_no_location(shop: Client) -> bool:
    key = fresh()
    return shop.order(key).headers["location"] != shop.order(key).headers.get("location")


@shows("replays.marked")
def a_retry_is_not_marked(shop: Client) -> bool:
    key = fresh()
    shop.order(key)
    return not {name.lower() for name in MARKERS} & set(shop.order(key).headers)


@shows("replays.white-space")
def other_white_space_is_executed(shop: Client) -> bool:
    return _both_executed(shop, ORDER, b'{ "quantity": 2,  "item": "teapot" }')


@shows("replays.escapes")
def an_escaped_letter_is_executed(shop: Client) -> bool:
    return _both_executed(shop, ORDER, ORDER.replace(b"teapot", b"\\u0074eapot"))


def _both_executed(shop: Client, one: bytes, two: bytes) -> bool:
    key = fresh()
    return shop.effects(lambda: (shop.order(key, one), shop.order(key, two))) > 1


# Another request under a used key


@shows("mismatches.status")
def another_body_does_not_get_422(shop: Client) -> bool:
    key = fresh()
    shop.order(key)
    return shop.order(key, OTHER).status != 422


@shows("mismatches.nothing-happens")
def another_body_gets_a_success(shop: Client) -> bool:
    key = fresh()
    shop.order(key)
    return shop.order(key, OTHER).ok


@shows("mismatches.while-running")
def another_body_succeeds_beside_the_first(shop: Client) -> bool:
    return all(reply.ok for reply in shop.at_once(ORDER, OTHER, key=fresh()))


@shows("mismatches.running-status")
def another_body_gets_neither_409_nor_422_beside_the_first(shop: Client) -> bool:
    return not {409, 422} & {reply.status for reply in shop.at_once(ORDER, OTHER, key=fresh())}


@shows("mismatches.query")
def another_query_gets_the_first_answer(shop: Client) -> bool:
    key = fresh()
    first = shop.order(key)
    return shop.order(key, query="?gift=1").body == first.body


@shows("mismatches.large-integers")
def large_integers_are_one(shop: Client) -> bool:
    return _taken_for_one(shop, ("9007199254740992", "9007199254740993"))


@shows("mismatches.types")
def a_number_and_its_text_are_one(shop: Client) -> bool:
    return _taken_for_one(shop, ("1", '"1"'), ("true", "1"), ("null", '""'))


@shows("mismatches.duplicate-names")
def the_first_of_two_members_is_ignored(shop: Client) -> bool:
    return _taken_for_one(shop, ('1, "note": 3', '2, "note": 3'))


def _taken_for_one(shop: Client, *pairs: tuple[str, str]) -> bool:
    """Whether an order with one of two notes, which the shop takes both, gets the answer of the other under its key."""

    def replayed(pair: tuple[str, str]) -> bool:
        one, two = (ORDER[:-1] + f', "note": {note}}}'.encode() for note in pair)
        key = fresh()
        first = shop.order(key, one)
        return first.ok and shop.order(fresh(), two).ok and shop.order(key, two).body == first.body

    return any(replayed(pair) for pair in pairs)


@shows("mismatches.surrogates")
def half_a_character_fails_with_a_key_only(shop: Client) -> bool:
    return _fails_with_a_key_only(shop, '"\\ud800"')


@shows("mismatches.depth")
def many_arrays_fail_with_a_key_only(shop: Client) -> bool:
    return _fails_with_a_key_only(shop, "[" * 5000 + "]" * 5000)


def _fails_with_a_key_only(shop: Client, note: str) -> bool:
    body = ORDER[:-1] + f', "note": {note}}}'.encode()
    return shop.order(fresh(), body).status >= 500 > shop.order(None, body).status


# Requests at the same moment


@shows("races.2", "races.10", "races.50")
def requests_at_the_same_moment_are_all_executed(shop: Client) -> bool:
    return shop.effects(lambda: shop.at_once(*[ORDER] * 10, key=fresh())) > 1


@shows("races.retry-after")
def a_client_that_must_wait_is_not_told_how_long(shop: Client) -> bool:
    busy = [reply for reply in shop.at_once(*[ORDER] * 10, key=fresh()) if reply.status in BUSY]
    return any("retry-after" not in reply.headers for reply in busy)


# Callers


@shows("tenants.independent")
def the_second_tenant_gets_no_order(shop: Client) -> bool:
    key = fresh()
    shop.order(key)
    return shop.effects(lambda: shop.order(key, caller="beta"), "beta") == 0


@shows("tenants.unseen")
def the_second_tenant_sees_that_the_key_is_used(shop: Client) -> bool:
    key = fresh()
    first = shop.order(key)
    other = shop.order(key, OTHER, caller="beta")
    return not other.ok or other.body == first.body


@shows("tenants.no-pass")
def a_used_key_is_answered_without_credentials(shop: Client) -> bool:
    key = fresh()
    return shop.order(key).body == shop.order(key, caller=None).body


@shows("tenants.not-spoilt")
def a_refused_caller_uses_the_key_up(shop: Client) -> bool:
    key = fresh()
    return shop.order(key, caller=None).status == 401 and not shop.order(key).ok


# Failures and clients that hang up


@shows("failures.no-wedge")
def a_failure_locks_the_key(shop: Client) -> bool:
    key = fresh()
    shop.order(key, fail="1")
    return {shop.order(key).status for _ in range(TRIES)} <= BUSY


@shows("failures.corrected")
def an_invalid_order_uses_the_key_up(shop: Client) -> bool:
    key = fresh()
    return shop.order(key, b'{"item": "teapot"}').status == 422 and not shop.order(key).ok


@shows("hang-ups.body")
def half_a_body_uses_the_key_up(shop: Client) -> bool:
    return _spoilt(shop, len(ORDER) // 2)


@shows("hang-ups.last-byte")
def all_but_a_byte_uses_the_key_up(shop: Client) -> bool:
    return _spoilt(shop, len(ORDER) - 1)


def _spoilt(shop: Client, sent: int) -> bool:
    """Whether the retry of a client that hung up is refused; a retry that overtakes what was sent shows nothing."""

    def refused() -> bool:
        key = fresh()
        shop.hang_up(key, sent=sent)
        replies = (shop.order(key) for _ in range(TRIES))
        return not any(reply.ok for reply in replies)

    return any(refused() for _ in range(TRIES))


@shows("hang-ups.sent")
def the_retry_of_a_lost_answer_is_executed(shop: Client) -> bool:
    def lost() -> None:
        key = fresh()
        shop.hang_up(key, sent=len(ORDER), slow=SLOWLY)
        shop.order(key)
        # What began before, and takes half as long, is over when this one is.
        shop.order(fresh(), slow=str(2 * float(SLOWLY)))

    return shop.effects(lost) - 1 > 1


# Refusals and descriptions


@shows("leaks.distinguished")
def a_refusal_has_neither_type_nor_code(shop: Client) -> bool:
    key = fresh()
    shop.order(key)
    try:
        refusal = json.loads(shop.order(key, OTHER).body)
    except ValueError:
        return True
    return not {"type", "code"} & set(refusal)


@shows("others.described")
def the_description_does_not_name_the_header(shop: Client) -> bool:
    return b"idempotency-key" not in shop.send("GET", "/openapi.json", b"", {}).body.lower()
