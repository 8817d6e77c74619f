"""Another key for what stores of cells keep: Redis, DynamoDB, and the store of the guide (R195)."""

from __future__ import annotations

import asyncio
import json
import runpy
from contextlib import closing
from typing import Any

import pytest
from fastapi import FastAPI

from contract.test_cells import DictCells
from harness.asgi import Reply, call
from harness.pages import ROOT
from oncekey import INLINE, PHASED, SINGLE_TENANT, Once, Operation, Policy
from oncekey.cells import Seen
from oncekey.core.envelopes import key_of_answer, key_of_text
from oncekey.core.errors import NotExecutedError
from oncekey.core.flow import drive
from oncekey.core.model import Record, State
from oncekey.databases.cells import CellDriver
from oncekey.stores.cells import CellStore
from oncekey.stores.cells_upkeep import keep_until
from oncekey.stores.rekey import Walked, rekey_records
from oncekey.stores.rows import record_of
from oncekey_contract.walking import cell_of, records
from sealing.looking import BOTH, K1, ONLY_NEW, rekeyed, used
from sealing.shop import MARK

CONTENT = {"response_headers", "response_body", "response_schema", "memo", "request", "version"}


@pytest.fixture(params=("redis", "dynamodb"))
def url(request):
    """The URL of an empty store of cells."""
    if request.param == "redis":
        server = request.getfixturevalue("valkey")
        server.say("FLUSHALL")
        return server.url
    server = request.getfixturevalue("dynalite")
    return server.url(request.getfixturevalue("dynamo_table")(server))


class Shop:
    """An application with everything that a store of cells keeps content of."""

    def __init__(self, url: str, seal: Any) -> None:
        self.once = once = Once(url, seal=seal, policy=Policy(max_attempts=1_000_000))
        self.app = app = FastAPI(lifespan=once.lifespan)
        self.runs: list[str] = []
        self.provider_down = False
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        once.install(app, tenant=SINGLE_TENANT)

        @app.post("/inline")
        @once.protect(effects=INLINE, low_stakes=True)
        async def inline(body: dict[str, Any]) -> dict[str, Any]:
            self.runs.append("inline")
            return body

        @app.post("/phased")
        @once.protect(effects=PHASED, low_stakes=True)
        async def phased(body: dict[str, Any], op: Operation) -> dict[str, Any]:
            async def charge(*, key: str) -> dict[str, Any]:
                if self.provider_down:
                    raise NotExecutedError("no connection")
                self.reached.set()
                await self.go_on.wait()
                return {"charge": body}

            def drawn() -> dict[str, Any]:
                self.runs.append("drawn")
                return body

            seen = await op.value("seen", drawn)
            return {"seen": seen, "charged": await op.call("charge", charge, repeatable=True)}

    def lifespan(self) -> Any:
        return self.app.router.lifespan_context(self.app)

    async def post(self, path: str, key: str) -> Reply:
        lines = [("Idempotency-Key", f'"{key}"'), ("Content-Type", "application/json")]
        return await call(self.app, "POST", path, headers=lines, body=json.dumps({"name": MARK}).encode())

    async def everything(self, start: str) -> None:
        """Answers, results, and a request that a completer would repeat."""
        for path in ("inline", "phased"):
            assert (await self.post(f"/{path}", f"{start}-{path}-0000000000")).status == 200
        self.provider_down = True
        assert (await self.post("/phased", f"{start}-begun-0000000000")).status == 500
        self.provider_down = False


async def test_after_a_rotation_the_old_key_is_not_needed(url):
    async with (plain := Shop(url, None)).lifespan():
        await plain.everything("plain")
    parts = ("answers", "results", "requests")
    async with (old := Shop(url, K1)).lifespan():
        await old.everything("older")
        assert await used(url) == {part: {None, "k1"} for part in parts}
        old.reached.clear()
        old.go_on.clear()
        running = asyncio.create_task(old.post("/phased", "owned-0000000000000000"))
        await old.reached.wait()
        assert await rekeyed(url, BOTH) == Walked(looked=7, resealed=6, owned=1)
        assert await used(url) == {"answers": {"k2"}, "results": {"k1", "k2"}, "requests": {"k1", "k2"}}
        old.go_on.set()
        first = await running  # whoever owns a record does not notice
        assert first.status == 200
    assert await rekeyed(url, BOTH) == Walked(looked=7, resealed=1)
    assert await rekeyed(url, BOTH) == Walked(looked=7)
    assert await used(url) == {part: {"k2"} for part in parts}
    async with (shop := Shop(url, ONLY_NEW)).lifespan():
        assert (await shop.post("/phased", "owned-0000000000000000")).body == first.body
        for start in ("plain", "older"):
            for path in ("inline", "phased"):
                assert (await shop.post(f"/{path}", f"{start}-{path}-0000000000")).replayed
            # What was begun under the old key, or without one, goes on from its stored steps.
            again = await shop.post("/phased", f"{start}-begun-0000000000")
            assert (again.status, again.json()["seen"]) == (200, {"name": MARK})
        assert shop.runs == []


async def test_walks_and_requests_do_not_disturb_each_other(url):
    begun = [f"begun-{number}-0000000000" for number in range(4)]
    async with (old := Shop(url, K1)).lifespan():
        old.provider_down = True
        for key in begun:
            assert (await old.post("/phased", key)).status == 500
    async with (shop := Shop(url, BOTH)).lifespan():
        shop.provider_down = True
        ended = asyncio.Event()

        async def repeat(key: str) -> int:
            sent = 0
            while not ended.is_set() or not sent:
                assert (await shop.post("/phased", key)).status == 500
                assert (await shop.post("/inline", f"{key}-{sent}")).status == 200
                sent += 1
            return sent

        clients = [asyncio.create_task(repeat(key)) for key in begun[1:]]
        done = Walked()
        while not done.resealed:  # nobody is at work on the first one
            done += await rekeyed(url, BOTH, limit=2)
        ended.set()
        assert all([await client for client in clients])
        await rekeyed(url, BOTH)
        assert await rekeyed(url, BOTH) == Walked(looked=len(begun) + shop.runs.count("inline"))
        assert "drawn" not in shop.runs  # they went on from what was stored under either key
    async with (shop := Shop(url, ONLY_NEW)).lifespan():
        for key in begun:
            assert (await shop.post("/phased", key)).status == 200
        assert shop.runs == []


def test_doctor_and_rekey_work_on_cell_stores(valkey, oncekey):
    valkey.say("FLUSHALL")
    asyncio.run(_kept(valkey.url))

    def levels(*keys: str) -> set[str]:
        said = json.loads(oncekey("doctor", "--store", valkey.url, "--json", keys=keys)[1])
        return {one["level"] for one in said["items"] if one["about"] == "seals"}

    assert (levels(), levels("k1"), levels("k2"), levels("k2", "k1")) == ({"note"}, {"ok"}, {"error"}, {"note", "ok"})
    code, out, _ = oncekey("rekey", "--store", valkey.url, keys=("k2",))
    assert (code, "3 skipped, which could not be decrypted" in out) == (1, True)
    rekey = ("rekey", "--store", valkey.url, "--json", "--batch", "2")
    code, out, _ = oncekey(*rekey, keys=("k2", "k1"))
    assert (code, json.loads(out)["resealed"]) == (0, 3)
    assert levels("k2") == {"ok"}


async def _kept(url: str) -> None:
    async with (shop := Shop(url, K1)).lifespan():
        await shop.everything("sealed")


class Kept(DictCells):
    """Cells that remember until when they have to keep a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.until: dict[tuple[str, str], int | None] = {}

    def swap(self, scope, key, seen, cell, keep_until):
        swapped = super().swap(scope, key, seen, cell, keep_until)
        if swapped:
            self.until[scope, key] = keep_until
        return swapped


def walked(driver: CellDriver, seal: Any, limit: int = 7) -> Walked:
    store, done, after = CellStore(), Walked(), None
    while True:
        stop = drive(rekey_records(store, seal, after, limit), driver.run)
        done, after = done + stop.walked, stop.after
        if after is None:
            return done


def keys_of(record: Record) -> set[str | None]:
    names = [key_of_text(entry.result) for entry in record.memo]
    return {*names, *(() if record.response is None else (key_of_answer(record.response),))}


@pytest.mark.parametrize("make", ["example", "dictionary"])
def test_every_record_of_any_state_is_walked_over_and_only_its_content_changes(make, tmp_path):
    example = runpy.run_path(str(ROOT / "examples/sqlite_cells.py"))["SqliteCells"]
    with closing(example(tmp_path / "cells.db") if make == "example" else Kept()) as cells:
        now = cells.look("", "")[1]
        planted = [one for number, one in enumerate(records(now)) if number % 11 == 0]
        whole = [cell_of(one) for one in planted if one.state is not State.PENDING]
        for cell in whole:
            assert cells.swap(cell["scope"], cell["key"], None, cell, keep_until(cell))
        full = [one for one in whole if one["memo"] or one["request"] or one["response_status"]]
        owned = [one for one in full if one["state"] == "in_progress"]
        assert len({one["state"] for one in full}) == 5
        assert len(owned) > 10
        driver = CellDriver(cells)
        done = walked(driver, K1)
        assert done == Walked(looked=len(full), resealed=len(full) - len(owned), owned=len(owned))
        assert walked(driver, BOTH) == done  # once more, from one key to the next
        assert walked(driver, BOTH) == Walked(looked=len(full), owned=len(owned))
        for cell in whole:
            there, _ = cells.look(cell["scope"], cell["key"])
            moved = cell in full and cell not in owned
            assert {name for name in cell if there[name] != cell[name]} <= (CONTENT if moved else set())
            assert there["version"] == cell["version"] + 2 * moved
            if moved:
                assert keys_of(record_of(there, None)) <= {"k2"}
            if make == "dictionary":
                assert cells.until[cell["scope"], cell["key"]] == keep_until(cell)


def test_changed_or_owned_records_are_not_rewritten():
    cells = DictCells()
    driver, store = CellDriver(cells), CellStore()
    now = cells.look("", "")[1]
    done = cell_of(next(one for one in records(now) if one.state is State.COMPLETED))
    owned = cell_of(next(one for one in records(now) if one.state is State.IN_PROGRESS and one.memo))
    for cell in (done, owned):
        assert cells.swap(cell["scope"], cell["key"], None, cell, None)
    seen = {one.id.key: one for one in drive(store.reseal.records(10), driver.run)}
    moved = {**done, "version": done["version"] + 1}
    assert cells.swap(done["scope"], done["key"], Seen(done["incarnation"], done["version"]), moved, None)
    for there in (moved, owned):
        ours = record_of({**there, "request": b"of an old walk"}, None)
        assert not drive(store.reseal.rewrite(seen[there["key"]], ours), driver.run)
        assert cells.look(there["scope"], there["key"])[0] == there
