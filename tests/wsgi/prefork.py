"""A shop for servers that fork: `python -m gunicorn wsgi.prefork:app`, with its database in `SHOP`.

Where `SHOP_SERVES_FIRST` is set, the process that imports this serves a request itself: with `--preload` that is the
parent of all workers, which then has a pool, a runtime and connections that none of them may use.
"""

from __future__ import annotations

import io
import json
import os
from typing import Any

from wsgi.shop import Shop

shop = Shop(os.environ["SHOP"], lease=1.0, dies=True)
app = shop.application(os.environ["SHOP_KIND"])
once = shop.once


def _serves(path: str, order: dict[str, Any]) -> bytes:
    body = json.dumps(order).encode()
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "SERVER_NAME": "shop",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_IDEMPOTENCY_KEY": "the-one-of-the-parent",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
    }
    return b"".join(app(environ, lambda *_: None))


if "SHOP_SERVES_FIRST" in os.environ:
    print(_serves("/where", {"item": "first"}).decode(), flush=True)
