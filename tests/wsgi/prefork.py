"""A shop for servers that fork: `python -m gunicorn wsgi.prefork:app`, with its database in `SHOP`.

Where `SHOP_SERVES_FIRST` is set, the process that imports this serves a request itself: with `--preload` that is the
parent of all workers, which then has a pool, a runtime and connections that none of them may use.

`python -m wsgi.prefork` forks while a handler of the parent holds the only connection of its pool; it prints what both
were answered, and who owned the claim of the child.
"""

from __future__ import annotations

import io
import json
import os
import threading
from typing import Any

from harness.patience import PATIENCE
from oncekey.engine import claiming
from wsgi.shop import Shop

shop = Shop(os.environ["SHOP"])
app = shop.application(os.environ["SHOP_KIND"])


def serves(path: str, order: dict[str, Any], key: str) -> bytes:
    """What one request is answered."""
    body = json.dumps(order).encode()
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "SERVER_NAME": "shop",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_IDEMPOTENCY_KEY": key,
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
    }
    return b"".join(app(environ, lambda *_: None))


def main() -> None:
    """Fork while the parent is busy."""
    answers: list[bytes] = []
    order = {"item": "parent", "does": "wait"}
    busy = threading.Thread(target=lambda: answers.append(serves("/local", order, "the-key-of-the-parent")))
    busy.start()
    assert shop.entered.acquire(timeout=PATIENCE)
    child = os.fork()
    if child == 0:
        try:
            print(serves("/where", {"item": "child"}, "the-key-of-the-child").decode(), claiming.PROCESS, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    shop.go_on.set()
    busy.join()
    print(child, answers[0].decode(), claiming.PROCESS, flush=True)


if __name__ == "__main__":
    main()
elif "SHOP_SERVES_FIRST" in os.environ:
    print(serves("/where", {"item": "first"}, "the-key-of-the-parent").decode(), flush=True)
