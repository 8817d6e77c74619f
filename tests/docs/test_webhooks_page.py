"""The programs of the page about webhooks: a call whose reply was lost is settled by the provider's message."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from docs.test_django_page import migrate, run
from docs.test_django_page import project as project_of_the_guide
from harness.pages import ROOT, Page, load
from harness.patience import PATIENCE
from harness.served import Served
from oncekey.core.resolution import sign

PAGE = Page(ROOT / "docs/howto/webhooks.md")
KEY = {"Idempotency-Key": "a-key-of-the-page-about-webhooks"}
SECRET = b"whsec_0123456789abcdef"
SETTLED = {"detail": "Settled."}

project = project_of_the_guide


class Provider(NamedTuple):
    """Where a program takes messages, what they look like, and how they are signed."""

    path: str
    header: str
    signed: Callable[[bytes], str]
    event: Callable[[str], dict[str, Any]]


def event(key: str) -> dict[str, Any]:
    return {"id": "evt_1", "charge": {"id": "ch_7", "downstream_key": key}}


def stripes(key: str) -> dict[str, Any]:
    charge = {"id": "ch_7", "metadata": {"downstream_key": key}}
    return {"id": "evt_1", "type": "charge.succeeded", "data": {"object": charge}}


def now(body: bytes) -> str:
    return sign(body, SECRET, int(time.time()))


def plainly(body: bytes) -> str:
    return "sha256=" + hmac.new(SECRET, body, hashlib.sha256).hexdigest()


OURS = Provider("/webhooks/provider", "Oncekey-Signature", now, event)
PROGRAMS = {
    "stripe": ("payments.py", Provider("/webhooks/stripe", "Stripe-Signature", now, stripes)),
    "another scheme": ("payments.py", Provider("/webhooks/other", "X-Hub-Signature-256", plainly, stripes)),
    "flask": ("shop.py", OURS),
    "litestar": ("hooked.py", OURS),
}

Post = Callable[..., tuple[int, Any]]


def settle(provider: Provider, post: Post, keys: list[str]) -> None:
    """Lose a reply, refuse what is not signed, settle by what is, and get the response of the first request."""
    status, problem = post("/payments", b"", KEY)
    assert (status, problem["code"]) == (409, "idempotency_outcome_unknown")
    (key,) = keys
    body = json.dumps(provider.event(key)).encode()
    forged = json.dumps(provider.event(key)).replace("ch_7", "ch_8").encode()
    kind = {"Content-Type": "application/json"}
    assert post(provider.path, body, kind)[0] == 401
    assert post(provider.path, forged, {**kind, provider.header: provider.signed(body)})[0] == 401
    assert post("/payments", b"", KEY)[0] == 409
    assert post(provider.path, body, {**kind, provider.header: provider.signed(body)}) == (200, SETTLED)
    assert post("/payments", b"", KEY) == (201, {"charge": "ch_7"})
    assert len(keys) == 1, "the call is not made again"


@pytest.mark.parametrize("name", PROGRAMS)
def test_provider_webhook_settles_a_call_with_a_lost_reply(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, provider = PROGRAMS[name]
    module: Any = load(PAGE.program(file), file, tmp_path, monkeypatch)
    keys: list[str] = []

    def lose(key: str) -> None:
        keys.append(key)
        raise TimeoutError

    async def lose_later(key: str) -> None:
        lose(key)

    monkeypatch.setattr(module, "charge", lose if name == "flask" else lose_later)
    if name == "flask":
        client = module.app.test_client()

        def post(path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
            answer = client.post(path, data=body, headers=headers)
            return answer.status_code, answer.get_json()

        settle(provider, post, keys)
        module.once.blocking().close()
        return

    with Served(module.app) as server:

        def post_over_http(path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
            # On a connection of its own: a server closes one whose handler has raised.
            answer = httpx.post(
                f"http://127.0.0.1:{server.port}{path}", content=body, headers=headers, timeout=PATIENCE
            )
            return answer.status_code, answer.json()

        settle(provider, post_over_http, keys)


IN_DJANGO = """
import django, json
django.setup()
from base64 import b64encode
from django.contrib.auth.models import User
from django.test import Client
from docs.test_webhooks_page import OURS, settle
from shop import views
User.objects.create_user("ann", password="secret")
token = {"Authorization": "Basic " + b64encode(b"ann:secret").decode()}
client = Client(enforce_csrf_checks=True, raise_request_exception=False, SERVER_NAME="127.0.0.1")
def post(path, body, headers):
    login = token if path == "/payments" else {}
    body = body or b'{"amount": 5}'
    answer = client.post(path, body, content_type="application/json", headers={**headers, **login})
    said = answer.json()
    return answer.status_code, {"charge": said["charge"]} if "charge" in said else said
keys = []
def lose(amount, key):
    keys.append(key)
    raise TimeoutError
views.charge = lose
settle(OURS, post, keys)
assert client.get("/webhooks/provider").status_code == 405
"""


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "ATOMIC_REQUESTS"])
def test_django_webhook_settles_a_call_with_a_lost_reply(project: Path, atomic: bool) -> None:
    migrate(project)
    (block,) = [one for one in PAGE.blocks("python") if one.file == "shop/webhooks.py"]
    (project / "shop" / "webhooks.py").write_text(block.text)
    for file, text, instead in (
        ("urls", "urlpatterns = [", 'urlpatterns = [\n    path("webhooks/", include("shop.webhooks")),'),
        ("views", "repeatable=True", "repeatable=False"),
        ("views", '@api_view(["POST"])\n', '@transaction.non_atomic_requests\n@api_view(["POST"])\n'),
        ("views", "from typing import Any\n", "from typing import Any\n\nfrom django.db import transaction\n"),
        ("settings", "ONCEKEY =", f'DATABASES["default"]["ATOMIC_REQUESTS"] = {atomic}\nONCEKEY ='),
    ):
        path = project / "shop" / f"{file}.py"
        assert text in path.read_text()
        path.write_text(path.read_text().replace(text, instead))
    run(project, "-c", IN_DJANGO)
