"""How tests ask: by Django's own client, which needs no socket."""

from __future__ import annotations

import json
import uuid
from typing import Any

from django.test import Client


def new_key() -> str:
    return uuid.uuid4().hex


def post(path: str, body: Any = None, *, key: str | None = "", by: str = "ann", client: Client | None = None, **more):
    """Send a request; a key of its own unless one is named."""
    headers = {"Authorization": f"Bearer {by}"} | more.pop("headers", {})
    if key is not None:
        headers["Idempotency-Key"] = key or new_key()
    client = client or Client(raise_request_exception=False)
    method = more.pop("method", "post")
    data = json.dumps({"item": "tea"} if body is None else body)
    return getattr(client, method)(path, data, content_type="application/json", headers=headers, **more)


def replayed(response) -> bool:
    return response.headers.get("Idempotent-Replayed") == "true"


def sold() -> list[str]:
    from django_shop.models import Order

    return sorted(Order.objects.values_list("item", flat=True))


def stored(alias: str) -> int:
    """How many records there are."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {'oncekey.record' if alias == 'default' else 'oncekey_record'}")
        return cursor.fetchone()[0]
