"""Who gets in, for how long, and what is refused to whom."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from urllib.parse import urlencode

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from console.trouble import INLINE_KEY, fill, opened
from console.visiting import ANN, BOB, TOKENS, Visitor, console_on, said
from harness.asgi import until
from harness.patience import PATIENCE
from harness.served import Served
from oncekey.console import Console, Operator, Role, Tokens
from oncekey.console.access import ATTEMPTS, IDLE, LONGEST, Attempts, Sessions
from oncekey.core.errors import ConfigurationError


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('access') / 'shop.db'}"
    with opened(url) as world:
        fill(world, finished=3)
    return url


def test_console_requires_tokens_or_an_authenticate_function(url):
    for options in ({}, {"tokens": TOKENS, "authenticate": lambda _: None}):
        with pytest.raises(ConfigurationError, match="needs either tokens="):
            Console(url, **options)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no tokens"),
        ("# nobody yet", "has no tokens"),
        ("ann:operate:short", "shorter than 16"),
        ("ann:admin:0123456789abcdef", "ROLE is read or operate"),
        ("0123456789abcdef", "NAME:ROLE:TOKEN"),
        (" :read:0123456789abcdef", "without a name"),
    ],
)
def test_invalid_console_tokens_raise_a_configuration_error(text, why):
    with pytest.raises(ConfigurationError, match=why):
        Tokens.read(text)


def test_a_mistake_in_tokens_does_not_show_them():
    with pytest.raises(ConfigurationError) as found:
        Tokens.read("ann:operate:hunter2")
    assert "hunter2" not in str(found.value)


def test_console_rejects_the_memory_store():
    with pytest.raises(ConfigurationError, match="this store does not support operator commands"):
        Console("memory:", tokens=TOKENS)


@pytest.mark.parametrize("path", ["", "records", "unknown", "letters", "audit", "live", "series.json", "record/abc"])
async def test_console_redirects_to_login_without_a_session(url, path):
    async with Visitor(console_on(url)) as visitor:
        answer = await visitor.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login")
        assert (await visitor.get(path, headers={"hx-request": "true"})).status_code == 401


async def test_login_redirects_only_to_local_paths(url):
    async with Visitor(console_on(url)) as visitor:
        asked = await visitor.get("records?state=unknown")
        assert asked.headers["location"] == "/login?next=/records%3Fstate%3Dunknown"
        for wanted, there in (
            ("/records?state=unknown", "/records?state=unknown"),
            ("//evil.example/x", "/"),
            ("/\\evil.example", "/"),
            ("https://evil.example", "/"),
            ("", "/"),
        ):
            answer = await visitor.http.post("login", data={"token": ANN, "next": wanted})
            assert answer.status_code == 303
            shown = await visitor.get(answer.headers["location"])
            assert (shown.status_code, shown.headers["location"]) == (303, there)


async def test_session_cookie_is_httponly_samesite_and_secure(url):
    async with Visitor(console_on(url, public=True), base="https://shop.example") as visitor:
        cookie = (await visitor.log_in()).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" in cookie


async def test_login_returns_429_after_too_many_wrong_tokens(url):
    async with Visitor(console_on(url)) as visitor:
        for _ in range(ATTEMPTS):
            assert (await visitor.log_in("wrong-token-0123456789")).status_code == 401
        refused = await visitor.log_in(ANN)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert "Too many invalid tokens" in said(refused)


def test_login_attempts_are_limited_per_address_and_in_total():
    clock = Clock()
    attempts = Attempts(clock=clock)
    for _ in range(ATTEMPTS):
        attempts.failed("10.0.0.1")
    assert attempts.wait("10.0.0.1") == 301
    assert attempts.wait("10.0.0.2") == 0
    clock.now += 300
    assert attempts.wait("10.0.0.1") == 0
    for number in range(100):
        attempts.failed(f"10.1.0.{number}")
    assert attempts.wait("10.9.9.9") > 0  # many addresses are one attacker


def test_session_expires_when_idle_and_after_its_longest_duration():
    clock = Clock()
    sessions = Sessions(clock=clock)
    ann = Operator("ann", Role.OPERATE)
    session = sessions.begin(ann)
    cookie = sessions.cookie(session)
    assert sessions.read(cookie, lambda *_: ann) == session
    clock.now += IDLE + 1
    assert sessions.read(cookie, lambda *_: ann) is None
    clock.now = session.began
    while clock.now - session.began < LONGEST:
        clock.now += IDLE / 2
        renewed = sessions.cookie(session)
    assert sessions.read(renewed, lambda *_: ann) is not None
    clock.now += 1
    assert sessions.read(renewed, lambda *_: ann) is None


def test_forged_session_cookie_is_rejected():
    ours, theirs = Sessions(b"one secret"), Sessions(b"another secret")
    cookie = theirs.cookie(theirs.begin(Operator("eve", Role.OPERATE)))
    for forged in (cookie, cookie[:-1], "", ".", "a.b", cookie.replace(".", ".é")):
        assert ours.read(forged, lambda *_: Operator("eve")) is None
    same = Sessions(b"another secret")
    assert same.read(cookie, lambda *_: Operator("eve")) is not None


async def test_a_session_that_is_over_leads_to_the_login(url):
    clock = Clock()
    async with Visitor(console_on(url, sessions=Sessions(clock=clock))) as visitor:
        await visitor.log_in()
        page = await visitor.find(INLINE_KEY)
        clock.now += IDLE + 1
        assert (await visitor.get("")).headers["location"] == "/login"
        late = await visitor.post(f"{page}/move/executed", reason="late", status="201", confirmed="yes")
        assert late.status_code == 401
        assert "Nothing was changed" in said(late)


async def test_background_polling_does_not_extend_the_session(url):
    clock = Clock()
    async with Visitor(console_on(url, sessions=Sessions(clock=clock))) as visitor:
        await visitor.log_in()
        for _ in range(3):
            clock.now += IDLE / 3
            assert (await visitor.get("live", headers={"hx-request": "true"})).status_code == 200
            assert (await visitor.get("series.json")).status_code == 200
        clock.now += 1
        over = await visitor.get("live", headers={"hx-request": "true"})
        assert (over.status_code, over.headers["hx-redirect"]) == (401, "/login")
        await visitor.log_in()
        for _ in range(3):
            clock.now += IDLE / 2
            assert (await visitor.get("records")).status_code == 200


async def test_logout_ends_the_session_in_every_process(url):
    secret = b"shared by two processes"
    async with Visitor(console_on(url, secret=secret)) as visitor, Visitor(console_on(url, secret=secret)) as elsewhere:
        await visitor.log_in()
        copy, proof = dict(visitor.http.cookies), visitor.proof
        elsewhere.http.cookies.update(copy)
        assert (await elsewhere.get("records")).status_code == 200
        assert (await visitor.post("logout")).status_code == 303
        for other in (visitor, elsewhere):
            other.http.cookies.clear()
            other.http.cookies.update(copy)
            assert (await other.get("records")).headers["location"].startswith("/login")
            assert (await other.get("live", headers={"hx-request": "true"})).status_code == 401
            assert (await other.post("find", proof=proof, key="abc")).status_code == 401
        elsewhere.http.cookies.clear()
        await elsewhere.log_in()
        assert (await elsewhere.get("audit")).status_code == 200
        assert "ann operator logged out of the console" in said(await elsewhere.get("audit"))


async def test_concurrent_login_attempts_are_limited_when_evaluated(url):
    console, begun, judged = console_on(url), 0, asyncio.Event()

    async def guess(token):
        """A log-in whose body comes when all of them have begun."""
        nonlocal begun
        body = urlencode({"token": token}).encode()
        answers = []

        async def receive():
            nonlocal begun
            begun += 1
            await judged.wait()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            answers.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/x-www-form-urlencoded")]
        scope = {"type": "http", "method": "POST", "path": "/login", "raw_path": b"/login", "query_string": b""}
        scope |= {"scheme": "http", "root_path": "", "http_version": "1.1", "server": ("127.0.0.1", 80)}
        await console({**scope, "headers": headers, "client": ("127.0.0.1", 50_000)}, receive, send)
        return answers[0]["status"]

    tokens = [f"wrong-token-{number:010}" for number in range(30)] + [ANN]
    guesses = [asyncio.create_task(guess(token)) for token in tokens]
    await until(lambda: begun == len(tokens))
    judged.set()
    statuses = [await one for one in guesses]
    assert statuses == [401] * ATTEMPTS + [429] * (len(tokens) - ATTEMPTS)
    await console.close()


async def test_a_token_that_is_taken_away_ends_its_sessions(url):
    secret = b"shared by two processes"
    async with Visitor(console_on(url, secret=secret)) as visitor:
        await visitor.log_in()
        cookies = visitor.http.cookies
    async with Visitor(console_on(url, secret=secret)) as elsewhere:
        elsewhere.http.cookies = cookies
        assert (await elsewhere.get("")).status_code == 200
    async with Visitor(console_on(url, secret=secret, tokens=f"bob:read:{BOB}")) as later:
        later.http.cookies = cookies
        assert (await later.get("")).status_code == 303


async def test_a_reader_may_look_and_change_nothing(url):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in(BOB)
        page = await visitor.find(INLINE_KEY)
        shown = await visitor.get(page)
        assert "You have read-only access" in said(shown)
        assert "/move/" not in shown.text
        for answer in (
            await visitor.get(f"{page}/move/executed"),
            await visitor.post(f"{page}/move/executed", reason="x", status="201", confirmed="yes"),
        ):
            assert answer.status_code == 403
            assert "bob has the role read; this page needs operate" in said(answer)
        assert "unknown" in said(await visitor.get(page))


@pytest.mark.parametrize("proof", ["", "0" * 64, "é"])
async def test_console_rejects_a_form_without_a_csrf_token(url, proof):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        page = await visitor.find(INLINE_KEY)
        answer = await visitor.post(f"{page}/move/executed", proof=proof, reason="x", status="201", confirmed="yes")
        assert answer.status_code == 403
        assert "The form was rejected" in said(answer)


async def test_console_rejects_a_cross_site_form(url):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}, {"origin": "null"}):
            answer = await visitor.http.post("find", data={"proof": visitor.proof, "key": "x"}, headers=headers)
            assert answer.status_code == 403
            answer = await visitor.http.post("login", data={"token": ANN}, headers=headers)
            assert answer.status_code == 403


async def test_csrf_token_is_valid_only_in_its_session(url):
    console = console_on(url)
    async with Visitor(console) as ann, Visitor(console) as eve:
        await ann.log_in()
        await eve.log_in(BOB)
        assert (await ann.post("find", proof=eve.proof, key="x")).status_code == 403


async def test_logout_ends_the_browser_session(url):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        assert (await visitor.post("logout")).status_code == 303
        assert (await visitor.get("")).status_code == 303


@pytest.mark.parametrize(
    ("base", "client", "heard"),
    [
        ("http://127.0.0.1", "127.0.0.1", True),
        ("http://localhost:8080", "::1", True),
        ("http://[::1]:8080", "::1", True),
        ("http://127.0.0.1", "10.0.0.7", False),
        ("http://shop.example", "127.0.0.1", False),  # a proxy on this machine, or a name that was rebound
        ("http://127.0.0.1", "not an address", False),
    ],
)
async def test_console_serves_only_localhost_unless_public(url, base, client, heard):
    async with Visitor(console_on(url), base=base, client=client) as visitor:
        assert (await visitor.get("login")).status_code == (200 if heard else 403)
    async with Visitor(console_on(url, public=True), base=base, client=client) as visitor:
        assert (await visitor.get("login")).status_code == 200


@pytest.mark.parametrize("waits", [False, True], ids=["def", "async def"])
async def test_application_can_authenticate_operators(url, waits):
    people = {"ann": Operator("ann", Role.OPERATE), "bob": Operator("bob")}

    def who(request):
        return people.get(request.headers.get("x-user", ""))

    async def who_later(request):
        return who(request)

    console = Console(url, authenticate=who_later if waits else who)
    app = Starlette(routes=[Mount("/console", console)])
    async with Visitor(app, base="http://127.0.0.1/console/") as visitor:
        assert (await visitor.get("")).status_code == 403
        assert (await visitor.get("login")).status_code == 404
        visitor.http.headers["x-user"] = "ann"
        page = await visitor.get("")
        assert "Log out" not in page.text
        assert (await visitor.post("find", key=INLINE_KEY)).status_code == 303
        visitor.http.headers["x-user"] = "bob"
        assert (await visitor.post("find", key=INLINE_KEY)).status_code == 403  # ann's form
        visitor.http.headers["x-user"] = ""
        assert (await visitor.get("")).status_code == 403


async def test_console_works_under_any_mount_path(url):
    app = Starlette(routes=[Mount("/deep/inside", console_on(url))])
    async with Visitor(app, base="http://127.0.0.1/deep/inside/") as visitor:
        assert (await visitor.get("")).headers["location"] == "/deep/inside/login"
        answer = await visitor.log_in()
        shown = await visitor.get(f"http://127.0.0.1{answer.headers['location']}")
        assert shown.headers["location"] == "/deep/inside/"
        assert "path=/deep/inside" in answer.headers["set-cookie"].lower()
        page = await visitor.get("")
        links = set(__import__("re").findall(r'(?:href|src|action|hx-get)="(/[^"]*)"', page.text))
        assert links
        assert all(link.startswith("/deep/inside/") for link in links)


@pytest.mark.parametrize("secret", [None, b"the same for all consoles"], ids=["own", "shared"])
def test_consoles_of_one_host_keep_their_sessions_apart(url, secret):
    """Cookies ignore ports, so a browser sends the cookie of each console to the others."""
    mounted, inner = console_on(url, secret=secret), console_on(url, secret=secret)
    app = Starlette(routes=[Mount("/console/inner", inner), Mount("/console", mounted)])
    alone = [Console(url, tokens=f"ann:operate:{ANN}{number}", secret=secret) for number in range(2)]
    with ExitStack() as servers:
        ports = [servers.enter_context(Served(one)).port for one in (app, *alone)]
        tokens = {
            f"http://127.0.0.1:{ports[0]}/console": ANN,
            f"http://127.0.0.1:{ports[0]}/console/inner": ANN,
            **{f"http://127.0.0.1:{port}": f"{ANN}{number}" for number, port in enumerate(ports[1:])},
        }
        with httpx.Client(timeout=PATIENCE, follow_redirects=True) as browser:
            for base, token in reversed(tokens.items()):
                assert "Log out" in browser.post(f"{base}/login", data={"token": token}).text
            for base in tokens:
                assert "Log out" in browser.get(f"{base}/").text


async def test_login_whose_session_cannot_be_read_says_so(url):
    async with Visitor(console_on(url, public=True)) as visitor:  # its cookie is for TLS, and this is plain HTTP
        answer = await visitor.http.post("login", data={"token": ANN}, follow_redirects=True)
    assert answer.status_code == 401
    assert "The token is valid, but your browser did not return the session's cookie" in said(answer)


async def test_every_console_response_has_security_headers(url):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        for path in ("", "login", "records", "nowhere", "assets/console.css", "series.json"):
            answer = await visitor.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            kept = "public, max-age=31536000, immutable" if path.startswith("assets") else "no-store"
            assert answer.headers["cache-control"] == kept


async def test_console_rejects_malformed_or_oversized_forms(url):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        assert (await visitor.http.post("find", json={"key": "x"})).status_code == 415
        large = await visitor.http.post("find", data={"key": "x" * 3_000_000})
        assert large.status_code == 413
        head = {"content-type": "application/x-www-form-urlencoded"}
        assert (await visitor.http.post("find", content=b"key=\xff", headers=head)).status_code == 400


async def test_concurrent_first_requests_share_one_engine(url):
    console = console_on(url)
    first = await asyncio.gather(*(console.engine() for _ in range(8)))
    assert len({id(one) for one in first}) == 1
    assert await console.engine() is first[0]
    await console.close()
