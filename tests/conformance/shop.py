"""A small shop by the standard library alone: right by itself, and wrong in one way for every bug that it is told."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import select
import socket
import threading
import time
import uuid
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

TENANTS = {"Bearer alpha": "alpha", "Bearer renewed": "alpha", "Bearer beta": "beta"}
ENDPOINTS = ("/orders", "/refunds")
DAY = "Mon, 16 Nov 2076 12:00:00 GMT"
STEP = 0.01


class Bug(StrEnum):
    """What is wrong with the shop."""

    CHECK_THEN_INSERT = "checks for the key first, and inserts it a moment later"
    CLAIMS_LATE = "checks for the key first, and inserts it only when the handler has run"
    NO_FINGERPRINT = "replays for any request with a used key"
    BODY_IN_KEY = "makes the body part of the key, so that another body is executed"
    LATE_FINGERPRINT = "compares bodies of finished requests only"
    MISMATCH_409 = "returns 409 for another body"
    MISMATCH_SPOILS = "loses the first response when another body arrives"
    CHUNKED_EMPTY = "treats a chunked body as empty"
    CHUNKED_UNCOMPARED = "compares only bodies that have a Content-Length"
    QUERY_IGNORED = "does not compare the query"
    ENDPOINT_IGNORED = "does not compare the path"
    RAW_BYTES = "compares bodies byte for byte"
    PIECES_COMPARED = "compares the chunks of a body as well"
    REPLAY_200 = "returns 200 for a retry of a 201"
    RESERIALISED = "serialises the stored JSON again for every replay"
    NEW_BODY_REPLAYED = "executes nothing for a retry, but returns a new ID and Location"
    LOST_LOCATION = "does not replay Location"
    RELOCKS = "locks a finished key again with every retry"
    RUNS_AGAIN = "executes retries, and returns the first response anyway"
    NO_MARKER = "does not mark replays"
    NO_EXPIRY = "does not send the expiry of keys"
    CACHED_500 = "stores server errors"
    LOCK_FOREVER = "never releases the lock of a failed request"
    ERROR_AFTER_EFFECT = "fails after the effect, and stores nothing"
    INVALID_STORED = "stores the refusal of an invalid body"
    GLOBAL_SCOPE = "has one set of keys for all tenants"
    REPLAY_BEFORE_LOGIN = "replays used keys before it checks credentials"
    STORED_401 = "stores the refusal of missing credentials"
    MISSING_RUNS = "executes requests without a key"
    NO_LINK = "refuses a missing key without a link to documentation"
    MALFORMED_IGNORED = "treats a malformed key as missing, and executes"
    FIRST_LINE_WINS = "uses the first of two keys"
    KEY_CUT = "truncates long keys"
    KEY_LIMIT_64 = "accepts keys up to 64 characters only"
    SHORT_KEYS = "accepts keys of any length"
    CASE_FOLDED = "ignores the case of keys"
    QUOTED_REFUSED = "does not accept quoted keys"
    QUOTES_KEPT = "treats the quotes as part of the key"
    PARAMETERS_KEPT = "treats parameters as part of the key"
    DIGITS_REFUSED = "accepts only bare keys that begin with a letter"
    NAME_IN_ONE_CASE = "treats the header name as case-sensitive"
    ODD_KEYS_CRASH = "builds SQL from the key"
    NO_ECHO = "does not repeat the key"
    NO_RETRY_AFTER = "sends no Retry-After"
    CONTENDED_FOREVER = "never unlocks a key that was requested while it was locked"
    NO_409 = "returns 500 while the first request runs"
    CONNECTION_TRUSTED = "does not look up keys again on the same connection"
    HANGUP_FORGETS = "loses the response when the client disconnects"
    HALF_BODY_CLAIMS = "locks the key before the body has arrived, and keeps it locked when the client disconnects"
    LEAKY_MISMATCH = "returns the first response for another body"
    FINGERPRINT_SHOWN = "returns the stored hash for another body"
    COOKIE_REPLAYED = "replays Set-Cookie"
    REFLECTS_KEY = "repeats a bad key in a page"
    ONE_CODE = "has one code for all refusals"
    GET_REPLAYS = "replays for GET as well"
    PUT_REPLAYS = "replays the response of POST for PUT"
    PUT_NEEDS_KEY = "refuses PUT without a key"
    UNDESCRIBED = "does not describe the header"
    KEY_PREFIX = "compares the first 200 characters of a key"
    KEY_SUFFIX = "compares the last 32 characters of a key"
    FIRST_BODY_SHOWN = "returns the first body for another one"
    FIRST_AMOUNT_SHOWN = "returns the first amount for another body"
    FIRST_BODY_ENCODED = "returns the first body in base64 for another one"
    GET_KEPT = "stores responses to GET under their key"
    GET_TAKES_KEY = "treats a key sent with GET as used"
    GET_ANSWERS_POST = "replays the response of GET for a later request"
    INCOMPLETE_STORED = "stores the refusal of a body that lacks a member"
    DUPLICATES_DROPPED = "uses the last of two members of one name"
    FIRST_DUPLICATE_TAKEN = "uses the first of two members of one name"
    INTEGERS_ROUNDED = "reads integers as floating point"
    SURROGATES_REPLACED = "replaces lone surrogates with question marks"
    DEPTH_CUT = "compares bodies to a depth of 32"
    DEPTH_CRASH = "needs no key, and returns 500 for a body that is too deep if there is one"
    REFUSES_422 = "returns 422 for a malformed key"
    TYPES_MIXED = "compares values as text"
    AMOUNT_ONLY = "compares only the amount in the body"
    ARRAYS_SORTED = "sorts arrays before it compares"
    TAKEN_OVER = "replaces a running request with another body"
    HANGUP_SPOILS = "returns 410 for the retry of a client that disconnected"
    LINKS_COLLAPSED = "stores one value of each header"
    LOST_HEADER = "does not replay a custom header of first responses"
    ENCODING_STORED = "stores compressed responses, and replays them to every client"
    TOKEN_SCOPED = "binds keys to the token instead of the caller"
    WAITS_FOR_A_DAY = "sends a Retry-After of a day"
    LONG_KEYS_CRASH = "fails for a key of several thousand characters"
    EMPTY_KEY_SHARED = "accepts an empty key"
    TENANT_B_SEES_A = "compares nothing, and has one set of keys for all tenants"
    RUNNING_ANSWERS_ANY = "lets any request with the key of a running request wait for its response"


class Way(StrEnum):
    """What is odd about the shop, and not wrong."""

    NO_CHUNKS = "treats a chunked body as empty, with and without a key, as Django does"
    NO_SLOW_BODIES = "refuses a body that arrives in pieces"
    UUIDS = "accepts only UUIDs as keys, in any case"
    UUIDS_422 = "accepts only UUIDs as keys, and refuses others with 422"
    OPTIONAL = "executes requests without a key, and treats an empty one as missing"
    CONSTANT = "returns the same response to every client"
    LOSERS_500 = "returns 500 to duplicates while the first request runs"
    NO_REPLAY = "returns 409 for every retry, forever"
    NEW_IDS = "includes a new request ID in every response, also in replays"
    STRICT = "refuses unknown members"
    NUMBERS_ONLY = "refuses a quantity that is not a number, after it checked the key"
    COERCES = "also accepts a number as text, and compares the parsed value"
    SUBSET = "compares known members, and ignores others"
    SAME_COOKIE = "sets the same cookie with every response, and replays it"
    REVISION = "includes a hash in every response"
    OPEN = "requires no credentials"
    NO_ODD_HEADERS = "returns 500 for a quote in any header"
    PAGED = "lists only the first page of its orders"
    LIMITED = "returns 429 for every seventh request"
    ECHO = "includes the key and the time in every body"
    SOLD_OUT = "accepts sixty orders, and refuses all others"
    WINDOW = "accepts forty requests in a quarter of a second, and returns 429 for the others"
    RESTARTED = "is restarted during the run, and does not respond for a moment"
    HTTP_DATES = "includes the HTTP date of the response in every body"
    BODY_MARKER = "marks a replay in the body, but in no header"
    LOCKED = "returns 423 with Retry-After while the first request runs"
    TOO_EARLY = "returns 425 with Retry-After while the first request runs"
    REPLAY_IS_200 = "returns 200 for a retry of a 201, as PayPal does"
    BARE_ONLY = "accepts only bare keys"
    SHORT_ONLY = "accepts only keys of up to 20 characters that begin with ord_"
    UNIQUE = "requires an unused reference with every new key"
    ACCEPTED = "returns 202 with a Location"
    LATER = "lists its orders a moment after the response, like a queue or a replica"
    WAITS = "lets a duplicate wait for the response of the first request"
    TEXTS = "returns errors as plain text"
    QUERY_KEY = "reads the key from the query"
    PATH_KEY = "reads the key from the path"
    COMPRESSES = "compresses responses for clients that accept it, and stores them uncompressed"


@dataclass
class Stored:
    """What is known under a key."""

    fingerprint: str
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    busy_until: float = 0.0
    request: bytes = b""
    compressed: bool = False


class RefusedError(Exception):
    """An answer instead of work."""

    def __init__(self, status: int, code: str, headers: tuple[tuple[str, str], ...] = (), **more: object) -> None:
        self.status, self.code, self.headers, self.more = status, code, headers, more


class Shop:
    """The server, between entering and leaving the block. `stripe` is the other flavour."""

    def __init__(self, *bugs: Bug | Way, stripe: bool = False) -> None:
        self.bugs, self.stripe = frozenset(bugs), stripe
        self.lock = threading.Lock()
        self.records: dict[tuple[str, str], Stored] = {}
        self.orders: list[tuple[str, str]] = []
        self.spoilt: set[str] = set()
        self.asked = 0
        self.dies_at = 0
        """The request at which the server dies; 0: it does not."""
        self.away_until = 0.0
        self.window: list[float] = []
        self.references: set[str] = set()
        self.page = 3
        self.late = 0.03
        """Seconds until an order is shown, where it is shown later."""
        self.replay_status = 0
        """The status of every replay; 0: the first one's."""
        self.slowed = 0
        """How many requests were asked to be slow."""
        self.kept: dict[tuple[str, str], object] = {}
        shop = self

        class Handler(_Handler):
            pass

        Handler.shop = shop
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def has(self, bug: Bug | Way) -> bool:
        return bug in self.bugs


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what this is about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    shop: Shop
    served = 0

    def log_message(self, *_: object) -> None:
        pass

    # Methods

    def do_GET(self) -> None:
        target = urlsplit(self.path).path
        if target == "/openapi.json":
            named = [] if self.shop.has(Bug.UNDESCRIBED) else [{"name": "Idempotency-Key", "in": "header"}]
            self._answer(200, [], {"openapi": "3.1.0", "paths": {"/orders": {"post": {"parameters": named}}}})
            return
        tenant = self._known()
        if tenant is None:
            self._answer(401, [], {"code": "unauthorized"})
            return
        if self.shop.has(Bug.GET_REPLAYS) and self._replay_anything(tenant):
            return
        mine = [order for owner, order in self.shop.orders if owner == tenant]
        mine = mine[: self.shop.page] if self.shop.has(Way.PAGED) else mine
        content: object = {"total": len(mine), "orders": mine}
        key = self.headers.get("Idempotency-Key", "").strip('"')
        if key and self.shop.has(Bug.GET_KEPT):
            content = self.shop.kept.setdefault((self.path, key), content)
        if key and self.shop.has(Bug.GET_TAKES_KEY):
            self.shop.records.setdefault((tenant, key), Stored("GET", 200, [], json.dumps(content).encode()))
        if key and self.shop.has(Bug.GET_ANSWERS_POST):
            self.shop.records.setdefault((tenant, key), Stored("", 200, [], json.dumps(content).encode()))
        self._answer(200, [], content)

    def do_PUT(self) -> None:
        self._body()
        if self.shop.has(Bug.PUT_NEEDS_KEY) and "Idempotency-Key" not in self.headers:
            self._answer(400, [], {"code": "key_missing"})
            return
        if self.shop.has(Bug.PUT_REPLAYS) and self._replay_anything("alpha"):
            return
        self._answer(405, [("Allow", "GET, POST")], {"code": "method_not_allowed"})

    def do_DELETE(self) -> None:
        self.do_PUT()

    def do_POST(self) -> None:
        self.served += 1
        try:
            self._post()
        except RefusedError as refusal:
            code = "refused" if self.shop.has(Bug.ONE_CODE) else refusal.code
            content = {"code": code, **refusal.more, **self._echoed()}
            self._answer(refusal.status, list(refusal.headers), content, problem=True)

    def do_PATCH(self) -> None:
        self.do_POST()

    # The operation

    def _post(self) -> None:
        shop = self.shop
        body = self._body()
        if body is None and shop.has(Bug.HALF_BODY_CLAIMS):
            shop.records[self._tenant(), self._key() or ""] = Stored("")
        if body is None:
            self.close_connection = True
            return
        if urlsplit(self.path).path not in ENDPOINTS and not shop.has(Way.PATH_KEY):
            raise RefusedError(404, "not_found")
        if shop.has(Way.NO_CHUNKS) and "Transfer-Encoding" in self.headers:
            body = b""
        with shop.lock:
            shop.asked += 1
            if shop.has(Way.LIMITED) and shop.asked % 7 == 0:
                raise RefusedError(429, "too_many", (("Retry-After", "0"),))
            if self._limited():
                raise RefusedError(429, "too_many", (("Retry-After", "1"),))
        if self._is_away():
            self.close_connection = True
            return
        if shop.has(Way.NO_SLOW_BODIES) and self.pieces > 3:
            raise RefusedError(408, "too_slow")
        if shop.has(Way.NO_ODD_HEADERS) and any("'" in value for value in self.headers.values()):
            raise RefusedError(500, "proxy_error")
        tenant = self._tenant()
        key = self._key()
        self._check_valid(tenant, key, body)
        if key is None:
            self._execute(tenant)
            return
        self._once(tenant, key, self._fingerprint(body), body)

    def _limited(self) -> bool:
        shop = self.shop
        if not shop.has(Way.WINDOW):
            return False
        now = time.monotonic()
        shop.window = [at for at in shop.window if now - at < 0.25]
        shop.window.append(now)
        return len(shop.window) > 40

    def _is_away(self) -> bool:
        shop = self.shop
        if shop.has(Way.RESTARTED) and shop.asked == 150:
            shop.away_until = time.monotonic() + 0.4
        return bool(shop.dies_at and shop.asked >= shop.dies_at) or time.monotonic() < shop.away_until

    def _known(self) -> str | None:
        return TENANTS.get(self.headers.get("Authorization", ""), "alpha" if self.shop.has(Way.OPEN) else None)

    def _tenant(self) -> str:
        shop, key = self.shop, self.headers.get("Idempotency-Key", "")
        tenant = self._known()
        if tenant is None and shop.has(Bug.REPLAY_BEFORE_LOGIN):
            stored = next((one for (_, known), one in shop.records.items() if known == key.strip('"')), None)
            if stored is not None:
                raise RefusedError(stored.status, "", tuple(stored.headers), order=json.loads(stored.body))
        if tenant is None and shop.has(Bug.STORED_401):
            shop.spoilt.add(key)
        if tenant is None or key in shop.spoilt:
            raise RefusedError(401, "unauthorized")
        return tenant

    def _lines(self) -> list[str]:
        """The key's lines, as if they all were in the header."""
        parts = urlsplit(self.path)
        if self.shop.has(Way.QUERY_KEY):
            return parse_qs(parts.query).get("key", [])
        if self.shop.has(Way.PATH_KEY):
            return [unquote(parts.path.removeprefix("/orders/"))] if parts.path.startswith("/orders/") else []
        return self.headers.get_all("Idempotency-Key") or []

    def _key(self) -> str | None:
        shop = self.shop
        lines = self._lines()
        if lines and len(lines[0]) > 4000 and shop.has(Bug.LONG_KEYS_CRASH):
            raise RefusedError(500, "database_error")
        if lines and not lines[0].strip('" ') and shop.has(Bug.EMPTY_KEY_SHARED):
            return "the-one-and-only-empty-key"
        if shop.has(Bug.NAME_IN_ONE_CASE):
            lines = [value for name, value in self.headers.items() if name == "Idempotency-Key"]
        if not lines:
            if shop.stripe or shop.bugs & {Bug.MISSING_RUNS, Bug.DEPTH_CRASH, Way.OPTIONAL}:
                return None
            link = () if shop.has(Bug.NO_LINK) else (("Link", '</keys>; rel="describedby"'),)
            raise RefusedError(400, "key_missing", link)
        if len(lines) > 1 and shop.has(Bug.FIRST_LINE_WINS):
            lines = lines[:1]
        if shop.has(Way.OPTIONAL) and not lines[0].strip():
            return None
        if shop.has(Way.UUIDS) or shop.has(Way.UUIDS_422):
            return self._as_uuid(", ".join(lines))
        key = None if len(lines) > 1 else self._parsed(lines[0].strip())
        if key is not None:
            return key
        if shop.has(Bug.MALFORMED_IGNORED):
            return None
        if shop.has(Bug.REFLECTS_KEY):
            raise RefusedError(400, "key_malformed", (("Content-Type", "text/html"),), page=lines[0])
        raise RefusedError(422 if shop.has(Bug.REFUSES_422) else 400, "key_malformed")

    def _as_uuid(self, line: str) -> str:
        try:
            return str(uuid.UUID(re.sub('^"(.*)"$', r"\1", line.strip())))
        except ValueError:
            raise RefusedError(422 if self.shop.has(Way.UUIDS_422) else 400, "key_malformed") from None

    def _parsed(self, line: str) -> str | None:
        shop = self.shop
        quoted = re.fullmatch(r'"((?:[ !#-\[\]-~]|\\["\\])*)"((?:; *[a-z]+(?:=[0-9]+)?)*)', line)
        bare = re.fullmatch(r"[A-Za-z0-9._~:/+=@-]+", line)
        if not quoted and not bare:
            return None
        if quoted and (shop.has(Bug.QUOTED_REFUSED) or shop.has(Way.BARE_ONLY)):
            return None
        if shop.has(Way.SHORT_ONLY) and not re.fullmatch(r"ord_[0-9a-f]{16}", quoted[1] if quoted else line):
            return None
        if bare and shop.has(Bug.DIGITS_REFUSED) and line[0].isdigit():
            return None
        key = quoted[1] if quoted else line
        if "'" in key and shop.has(Bug.ODD_KEYS_CRASH):
            raise RefusedError(500, "database_error")
        longest = 64 if shop.has(Bug.KEY_LIMIT_64) else 255
        if len(key) > longest and shop.has(Bug.KEY_CUT):
            key = key[:longest]
        if not (1 if shop.has(Bug.SHORT_KEYS) else 16) <= len(key.strip()) <= longest:
            return None
        if quoted and shop.has(Bug.QUOTES_KEPT):
            key = f'"{key}"'
        if quoted and shop.has(Bug.PARAMETERS_KEPT):
            key += quoted[2]
        if shop.has(Bug.KEY_PREFIX):
            key = key[:200]
        if shop.has(Bug.KEY_SUFFIX):
            key = key[-32:]
        return key.lower() if shop.has(Bug.CASE_FOLDED) else key

    def _check_valid(self, tenant: str, key: str | None, body: bytes) -> None:
        shop = self.shop
        try:
            document = self._read(body)
        except RecursionError:
            raise RefusedError(500 if key and shop.has(Bug.DEPTH_CRASH) else 400, "invalid") from None
        except ValueError:
            if key is not None and shop.has(Bug.INVALID_STORED):
                shop.records[tenant, key] = Stored(self._fingerprint(b"null"), 400, [], b'{"code": "invalid"}')
            raise RefusedError(400, "invalid") from None
        if "json" not in self.headers.get("Content-Type", ""):
            return
        known = set(document) if isinstance(document, dict) else set()
        if shop.has(Way.UNIQUE) and "reference" not in known:
            raise RefusedError(422, "incomplete")
        if known >= {"item", "quantity"} and not (shop.has(Way.STRICT) and len(known) > 2):
            return
        if key is not None and shop.has(Bug.INCOMPLETE_STORED):
            shop.records[tenant, key] = Stored(self._fingerprint(body), 422, [], b'{"code": "incomplete"}')
        raise RefusedError(422, "incomplete")

    def _read(self, body: bytes) -> Any:
        """The body as it is understood; two members of one name are no JSON here."""
        shop = self.shop
        if body.count(b"[") > 1000:
            raise RecursionError("too deep")

        def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            if shop.has(Bug.FIRST_DUPLICATE_TAKEN):
                return dict(reversed(pairs))
            if len(dict(pairs)) < len(pairs) and not shop.has(Bug.DUPLICATES_DROPPED):
                raise ValueError("two members of one name")
            return dict(pairs)

        read_int = float if shop.has(Bug.INTEGERS_ROUNDED) else int
        return json.loads(body, object_pairs_hook=members, parse_int=read_int)

    def _meaning(self, body: bytes) -> str:
        """What of the body is compared."""
        shop = self.shop
        if shop.has(Bug.RAW_BYTES):
            return body.hex()
        document = self._read(body)
        known = {"quantity"} if shop.has(Bug.AMOUNT_ONLY) else {"item", "quantity"}
        if shop.bugs & {Way.SUBSET, Bug.AMOUNT_ONLY} and isinstance(document, dict):
            document = {name: value for name, value in document.items() if name in known}
        if shop.has(Way.COERCES) and isinstance(document, dict):
            document |= {"quantity": int(document["quantity"])}
        text = json.dumps(self._simplified(document, 0), sort_keys=True)
        return re.sub(r"\\ud[89a-f][0-9a-f]{2}", "?", text) if shop.has(Bug.SURROGATES_REPLACED) else text

    def _simplified(self, document: Any, depth: int) -> Any:
        shop = self.shop
        if depth > 32 and shop.has(Bug.DEPTH_CUT):
            return None
        match document:
            case dict():
                return {name: self._simplified(value, depth + 1) for name, value in document.items()}
            case list():
                found = [self._simplified(value, depth + 1) for value in document]
                return sorted(found, key=json.dumps) if shop.has(Bug.ARRAYS_SORTED) else found
        return str(document) if shop.has(Bug.TYPES_MIXED) else document

    def _fingerprint(self, body: bytes) -> str:
        shop, parts = self.shop, urlsplit(self.path)
        path = "" if shop.has(Bug.ENDPOINT_IGNORED) else parts.path
        if "Transfer-Encoding" in self.headers and shop.has(Bug.CHUNKED_EMPTY):
            body = b"null"
        query = "" if shop.has(Bug.QUERY_IGNORED) else parts.query
        pieces = self.pieces // 4 if shop.has(Bug.PIECES_COMPARED) else 0
        return hashlib.sha256(f"{self.command} {path} {query} {self._meaning(body)} {pieces}".encode()).hexdigest()

    def _once(self, tenant: str, key: str, fingerprint: str, body: bytes) -> None:
        shop = self.shop
        if shop.has(Bug.BODY_IN_KEY):
            key += fingerprint
        place = ("" if shop.bugs & {Bug.GLOBAL_SCOPE, Bug.TENANT_B_SEES_A} else tenant, key)
        if shop.has(Bug.TOKEN_SCOPED):
            place = (self.headers.get("Authorization", ""), key)
        if shop.bugs & {Bug.CHECK_THEN_INSERT, Bug.CLAIMS_LATE} and place not in shop.records:
            _linger(float(self.headers.get("X-Slow", "0")) if shop.has(Bug.CLAIMS_LATE) else 0.05)
            shop.records[place] = Stored(fingerprint, request=body)
            self._run(tenant, place)
            return
        with shop.lock:
            stored = shop.records.get(place)
            if self.served > 1 and shop.has(Bug.CONNECTION_TRUSTED):
                stored = None
            if stored is None:
                shop.records[place] = Stored(fingerprint, request=body)
        if stored is None:
            self._run(tenant, place)
        else:
            self._again(place, stored, fingerprint)

    def _again(self, place: tuple[str, str], stored: Stored, fingerprint: str) -> None:
        shop = self.shop
        chunked = "Transfer-Encoding" in self.headers and shop.has(Bug.CHUNKED_UNCOMPARED)
        late = not stored.status and shop.has(Bug.LATE_FINGERPRINT)
        differs = stored.fingerprint not in {"", fingerprint}
        if differs and not stored.status and shop.has(Bug.TAKEN_OVER):
            self._run(place[0], place)
            return
        running = not stored.status and shop.has(Bug.RUNNING_ANSWERS_ANY)
        if running or (not stored.status and shop.has(Way.WAITS) and not differs):
            while not stored.status and place in shop.records:
                time.sleep(STEP)
            running = running or not differs
        if differs and not (chunked or late or running or shop.bugs & {Bug.NO_FINGERPRINT, Bug.TENANT_B_SEES_A}):
            if shop.has(Bug.MISMATCH_SPOILS):
                stored.body = b'{"code": "gone"}'
                stored.status = 410
            more = {"stored": json.loads(stored.body or b"{}")} if shop.has(Bug.LEAKY_MISMATCH) else {}
            more |= {"fingerprint": stored.fingerprint} if shop.has(Bug.FINGERPRINT_SHOWN) else {}
            more |= {"sent": stored.request.decode()} if shop.has(Bug.FIRST_BODY_SHOWN) else {}
            more |= {"sent": b64encode(stored.request).decode()} if shop.has(Bug.FIRST_BODY_ENCODED) else {}
            more |= {"was": json.loads(stored.request)["quantity"]} if shop.has(Bug.FIRST_AMOUNT_SHOWN) else {}
            status = 409 if shop.has(Bug.MISMATCH_409) else 400 if shop.stripe else 422
            raise RefusedError(status, "key_mismatch", **more)
        if not stored.status or time.monotonic() < stored.busy_until:
            wait = () if shop.has(Bug.NO_RETRY_AFTER) else (("Retry-After", "1"),)
            if shop.has(Bug.WAITS_FOR_A_DAY):
                wait = (("Retry-After", "86400"),)
            if shop.has(Way.LOCKED) or shop.has(Way.TOO_EARLY):
                raise RefusedError(423 if shop.has(Way.LOCKED) else 425, "in_progress", wait)
            if shop.has(Bug.CONTENDED_FOREVER):
                stored.busy_until = math.inf
            error = shop.has(Bug.NO_409) or shop.has(Way.LOSERS_500)
            raise RefusedError(500 if error else 409, "in_progress", wait)
        if shop.has(Way.NO_REPLAY):
            raise RefusedError(409, "done_already")
        if shop.has(Bug.RELOCKS):
            stored.busy_until = time.monotonic() + 0.3
        if shop.has(Bug.RUNS_AGAIN):
            self._order(place[0])
        self._replay(stored)

    def _run(self, tenant: str, place: tuple[str, str]) -> None:
        shop, stored = self.shop, self.shop.records[place]
        shop.slowed += "X-Slow" in self.headers
        _linger(float(self.headers.get("X-Slow", "0")))
        failing = "X-Fail" in self.headers
        if shop.has(Way.NUMBERS_ONLY) and not isinstance(json.loads(stored.request)["quantity"], int):
            del shop.records[place]
            raise RefusedError(422, "quantity")
        if failing and shop.has(Bug.ERROR_AFTER_EFFECT):
            self._order(tenant)
        if failing:
            if shop.has(Bug.CACHED_500):
                stored.body, stored.status = b'{"code": "broken"}', 500
            elif not shop.has(Bug.LOCK_FOREVER):
                del shop.records[place]
            raise RefusedError(500, "broken")
        self._check_supply(place)
        status, headers, content = self._order(tenant)
        stored.compressed = "gzip" in self.headers.get("Accept-Encoding", "")
        stored.headers, stored.body, stored.status = headers, json.dumps(content).encode(), status
        if shop.has(Bug.HANGUP_FORGETS) and self._client_has_gone():
            shop.records.pop(place, None)
        if shop.has(Bug.HANGUP_SPOILS) and self._client_has_gone():
            stored.body, stored.status = b'{"code": "gone"}', 410
        self._answer(status, headers, content)

    def _check_supply(self, place: tuple[str, str]) -> None:
        """Refuse what cannot be had any more; the key stays free."""
        shop = self.shop
        reference = json.loads(shop.records[place].request).get("reference") if shop.has(Way.UNIQUE) else None
        with shop.lock:
            sold_out = shop.has(Way.SOLD_OUT) and len(shop.orders) >= 60
            if sold_out or reference in shop.references:
                del shop.records[place]
                raise RefusedError(409, "sold_out" if sold_out else "reference_used")
            shop.references |= {reference} - {None}

    def _execute(self, tenant: str) -> None:
        self._answer(*self._order(tenant))

    def _order(self, tenant: str) -> tuple[int, list[tuple[str, str]], dict[str, object]]:
        order = str(uuid.uuid4())
        if self.shop.has(Way.LATER):
            threading.Timer(self.shop.late, self.shop.orders.append, [(tenant, order)]).start()
        else:
            self.shop.orders.append((tenant, order))
        if self.shop.has(Way.CONSTANT):
            return 201, [], {"status": "placed"}
        visit = "1" if self.shop.has(Way.SAME_COOKIE) else uuid.uuid4().hex
        headers = [("Location", f"/orders/{order}"), ("Set-Cookie", f"visit={visit}"), ("X-Shop", "teapots")]
        headers += [("Link", f'</orders/{order}/items>; rel="item"'), ("Link", '</help>; rel="help"')]
        status = 202 if self.shop.has(Way.ACCEPTED) else 201
        content: dict[str, object] = {"id": order, "status": "placed", **self._echoed()}
        if self.shop.has(Way.HTTP_DATES):
            content["at"] = self.date_time_string()
        return status, headers, content

    def _echoed(self) -> dict[str, object]:
        """What some APIs have in every body, also in refusals: it gives nothing away."""
        if not self.shop.has(Way.ECHO):
            return {}
        return {"key": self.headers.get("Idempotency-Key"), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}

    def _replay(self, stored: Stored) -> None:
        shop = self.shop
        dropped = {"" if shop.has(Bug.COOKIE_REPLAYED) or shop.has(Way.SAME_COOKIE) else "Set-Cookie"}
        dropped |= {"Location"} if shop.has(Bug.LOST_LOCATION) else set()
        dropped |= {"X-Shop"} if shop.has(Bug.LOST_HEADER) else set()
        headers = [line for line in stored.headers if line[0] not in dropped]
        if shop.has(Bug.LINKS_COLLAPSED):
            headers = list(dict(headers).items())
        if not shop.bugs & {Bug.NO_MARKER, Way.BODY_MARKER}:
            headers.append(("Idempotent-Replayed", "true"))
        body = json.dumps(json.loads(stored.body), indent=1) if shop.has(Bug.RESERIALISED) else stored.body.decode()
        if shop.has(Bug.NEW_BODY_REPLAYED):
            order = str(uuid.uuid4())
            body = json.dumps(json.loads(stored.body) | {"id": order})
            headers = [(name, f"/orders/{order}" if name == "Location" else value) for name, value in headers]
        if shop.has(Way.BODY_MARKER):
            body = json.dumps(json.loads(stored.body) | {"replayed": True})
        status = 200 if shop.has(Bug.REPLAY_200) or shop.has(Way.REPLAY_IS_200) else stored.status
        self._answer(shop.replay_status or status, headers, body, replayed=stored)

    # The wire

    def _body(self) -> bytes | None:
        self.pieces = 0
        if "Transfer-Encoding" in self.headers:
            chunks = []
            while size := int(self.rfile.readline() or b"0", 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        length, body = int(self.headers.get("Content-Length", "0")), b""
        while len(body) < length:
            piece = self.rfile.read1(length - len(body))
            if not piece:
                return None
            self.pieces += 1
            body += piece
        return body

    def _client_has_gone(self) -> bool:
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        with suppress(OSError):
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        return True

    def _replay_anything(self, tenant: str) -> bool:
        key = self.headers.get("Idempotency-Key", "").strip('"')
        stored = self.shop.records.get((tenant, key))
        if stored is not None:
            self._replay(stored)
        return stored is not None

    def _answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        content: object,
        *,
        problem: bool = False,
        replayed: Stored | None = None,
    ) -> None:
        if self.shop.has(Way.NEW_IDS):
            content = {**(json.loads(content) if isinstance(content, str) else content), "request": uuid.uuid4().hex}
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        if problem and self.shop.has(Way.TEXTS):
            data, headers = f"error: {content['code']}".encode(), [*headers, ("Content-Type", "text/plain")]
        accepts = "gzip" in self.headers.get("Accept-Encoding", "")
        if self.shop.has(Bug.ENCODING_STORED) and replayed is not None:
            accepts = replayed.compressed
        if accepts and self.shop.bugs & {Bug.ENCODING_STORED, Way.COMPRESSES}:
            data, headers = gzip.compress(data), [*headers, ("Content-Encoding", "gzip")]
        self.send_response(status)
        names = {name for name, _ in headers}
        if "Content-Type" not in names:
            self.send_header("Content-Type", "application/problem+json" if problem else "application/json")
        for name, value in headers:
            self.send_header(name, value)
        sent = self.headers.get("Idempotency-Key")
        if sent is not None and self.command == "POST" and not self.shop.has(Bug.NO_ECHO):
            with suppress(UnicodeEncodeError):
                sent.encode("latin-1")
                self.send_header("Idempotency-Key", sent)
        if self.shop.has(Way.REVISION):
            self.send_header("X-Revision", hashlib.sha1(b"1").hexdigest())
        if not self.shop.has(Bug.NO_EXPIRY):
            self.send_header("Idempotency-Key-Expires", DAY)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(data)


def _linger(seconds: float) -> None:
    """Be slow, in steps: on a busy machine each takes longer, so that who wants to meet a slow request still does."""
    for _ in range(round(seconds / STEP)):
        time.sleep(STEP)
