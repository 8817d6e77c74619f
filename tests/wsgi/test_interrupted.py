"""A request that is interrupted before and after every action of its life, as servers end a worker by an exception."""

from __future__ import annotations

import io
import json
import uuid
from itertools import count
from typing import Any

import pytest

from harness.interrupting import InterruptedThreads, Signal, Trial
from harness.patience import PATIENCE
from oncekey.runtimes.threads import ThreadRuntime
from wsgi.shop import Shop


def ask(app: Any, path: str, item: str, key: str) -> int:
    """One request; its status."""
    body = json.dumps({"item": item}).encode()
    said: list[str] = []
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_IDEMPOTENCY_KEY": key,
        "wsgi.input": io.BytesIO(body),
    }
    pieces = app(environ, lambda status, _: said.append(status))
    assert b"".join(pieces)
    return int(said[0][:3])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("path", ["/local", "/inline", "/phased"])
def test_a_request_may_be_interrupted_at_every_action(shop: Shop, path: str, when: str) -> None:
    # P4, P7: nothing stays open, no key is left owned, and nothing is done twice
    app = shop.application("plain")
    (installation,) = shop.once._threaded.values()
    assert ask(app, path, "first", uuid.uuid4().hex) == 201
    plain: ThreadRuntime = installation.runtime
    answers: set[int] = set()
    for at in count(1):
        key, item, trial = uuid.uuid4().hex, f"item {at}", Trial(at, when)
        installation.runtime = InterruptedThreads(plain.engine, trial)
        sent, interrupted = len(shop.charges), False
        try:
            assert ask(app, path, item, key) == 201
        except Signal:
            interrupted = True
        finally:
            assert installation.runtime.shut_down(PATIENCE)
            installation.runtime = plain
        assert interrupted == (trial.interrupted is not None), trial.names
        assert trial.open == [], trial.names
        again = ask(app, path, item, key)
        answers.add(again)
        rows = [sold for sold in shop.sold if sold.startswith(item)]
        if again == 201:
            assert len(shop.charges) - sent == (0 if path == "/local" else 1), trial.names
            assert rows == {"/local": [item], "/inline": [], "/phased": [item, f"{item} paid"]}[path], trial.names
        else:
            # What became of a call that was being made, nobody knows: it was made at most once.
            assert (again, path) == (409, "/phased"), trial.names
            assert trial.names[trial.names.index("announce") + 1] == trial.interrupted == "Call"
            assert len(shop.charges) - sent <= 1
        if not interrupted:
            break
    assert answers == ({201, 409} if path == "/phased" else {201})
    assert at >= {"/local": 3, "/inline": 4, "/phased": 14}[path]
