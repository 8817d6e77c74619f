"""Another key for what is stored: under load, after a kill, and what the commands say of it (R195)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest

from oncekey.sealing import from_environment
from oncekey.stores.rekey import Walked
from sealing.looking import BOTH, K1, ONLY_NEW, VARIABLE, everything, execute, rekeyed, shown, used
from sealing.shop import MARK, OLD, Shop

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("url", ["sqlite", "postgres", "mariadb", "mysql"], indirect=True)
async def test_keys_rotate_under_load(url):
    async with (plain := Shop(url, None)).lifespan():
        await everything(plain, "plain")
    async with (old := Shop(url, K1)).lifespan():
        answers = await everything(old, "older")
    parts = ("answers", "results", "requests", "payloads", "evidence")
    assert await used(url) == {key: {None, "k1"} for key in parts}
    async with (shop := Shop(url, BOTH)).lifespan():
        ended = asyncio.Event()

        async def traffic(number: int) -> int:
            sent = 0
            while not ended.is_set():
                first = await shop.post("/phased", f"load-{number}-{sent}-00000000")
                again = await shop.post("/phased", f"load-{number}-{sent}-00000000")
                older = await shop.post("/local", "older-local-0000000000")
                assert (first.status, again.replayed, again.body) == (200, True, first.body)
                assert (older.replayed, older.body) == (True, answers["local"].body)
                sent += 1
            return sent

        clients = [asyncio.create_task(traffic(number)) for number in range(3)]
        done = await rekeyed(url, BOTH)
        ended.set()
        assert all([await client for client in clients])
        assert done.resealed >= 10
        assert (await rekeyed(url, BOTH)).resealed == 0
        assert await used(url) == {key: {"k2"} for key in parts}
    async with (shop := Shop(url, ONLY_NEW)).lifespan():
        for start in ("plain", "older"):
            for path in ("local", "inline", "phased"):
                again = await shop.post(f"/{path}", f"{start}-{path}-0000000000")
                assert again.replayed
            # What was begun under the old key, or without one, goes on from its stored steps.
            assert (await shop.post("/phased", f"{start}-begun-0000000000")).status == 200
            accepted = await shop.post("/outbox", f"{start}-outbox-0000000000")
            assert (accepted.status, accepted.json()) == (202, {"accepted": {"name": MARK}})
        assert "first" not in shop.runs
        await shop.work()
        assert len(shop.told) == 2
        for start in ("plain", "older"):
            assert (await shop.post("/outbox", f"{start}-outbox-0000000000")).replayed
    if url.startswith("sqlite"):
        execute(url, "VACUUM")
        execute(url, "PRAGMA wal_checkpoint(TRUNCATE)")
    assert shown(url) == []


async def test_unreadable_record_does_not_stop_rekeying(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    async with (shop := Shop(url, K1)).lifespan():
        for number in range(5):
            await shop.post("/inline", f"order-{number}-0000000000")
    execute(url, "UPDATE oncekey.record SET response_schema = 99 WHERE key = %s", "order-1-0000000000")
    assert await rekeyed(url, BOTH, limit=2) == Walked(looked=4, resealed=4)


def killed_in_the_middle(url: str, key: str) -> None:
    """A process that is killed between two steps."""
    words = [sys.executable, "-m", "sealing.victim", url, key]
    with subprocess.Popen(words, cwd=TESTS, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        try:
            assert victim.stdout.readline() == "in the middle\n"
        finally:
            victim.kill()


async def test_killed_request_resumes_after_key_rotation(url):
    async with Shop(url, K1).lifespan():
        pass
    key = "killed-0000000000000000"
    killed_in_the_middle(url, key)
    assert shown(url) == []
    execute(url, "UPDATE oncekey.record SET lease_until = 0, deadline = 0")
    async with (shop := Shop(url, BOTH)).lifespan():
        assert (await rekeyed(url, BOTH)).owned == 1  # what somebody owns is left as it is
        await shop.work()  # the completer has the request, which was sealed under the old key
        answer = await shop.post("/phased", key)
        assert (answer.replayed, answer.json()["made"]) == (True, {"made": {"name": MARK}})
        assert shop.runs == ["phased", "charged"]
        assert (await rekeyed(url, BOTH)).owned == 0
    assert shown(url) == []


def test_commands_show_sealed_content_only_with_the_key(tmp_path, tmp_path_factory, oncekey):
    url = f"sqlite:///{tmp_path}/shop.db"
    asyncio.run(_kept(url))
    begun = ("keys", "show", "sealed-begun-0000000000", "--store", url, "--json")
    _, out, err = oncekey(*begun)
    assert MARK not in out + err
    assert json.loads(out)["steps"][0]["result"] == "sealed under the key k1"
    assert MARK in json.loads(oncekey(*begun, keys=("k1",))[1])["steps"][0]["result"]
    answered = ("keys", "show", "sealed-local-0000000000", "--store", url, "--json")
    assert json.loads(oncekey(*answered)[1])["response"] == {"status": 200, "sealed": "sealed under the key k1"}
    assert MARK in json.loads(oncekey(*answered, keys=("k1",))[1])["response"]["body"]

    def levels(*keys: str) -> set[str]:
        said = json.loads(oncekey("doctor", "--store", url, "--json", keys=keys)[1])
        return {one["level"] for one in said["items"] if one["about"] == "seals"}

    assert (levels(), levels("k1"), levels("k2"), levels("k2", "k1")) == ({"note"}, {"ok"}, {"error"}, {"note", "ok"})
    code, out, _ = oncekey("rekey", "--store", url, keys=("k2",))
    assert (code, "could not be decrypted" in out) == (1, True)
    assert oncekey("rekey", "--store", url)[0] == 2
    code, out, _ = oncekey("rekey", "--store", url, "--json", "--batch", "2", keys=("k2", "k1"))
    resealed = json.loads(out)["resealed"]
    assert (code, resealed > 5) == (0, True)
    assert json.loads(oncekey("rekey", "--store", url, "--json", keys=("k2", "k1"))[1])["resealed"] == 0
    assert levels("k2") == {"ok"}
    # What an operator gives by hand is sealed, too.
    resolve = ("keys", "resolve", "sealed-lost-0000000000", "--store", url, "--executed", "--reason", "asked them")
    body = tmp_path_factory.mktemp("desk") / "body.json"
    body.write_text(json.dumps({"name": MARK}))
    code, _, err = oncekey(*resolve, "--status", "200", "--body", str(body), keys=("k2",))
    assert (code, err) == (0, "")
    assert shown(url) == []


async def _kept(url: str) -> None:
    async with (shop := Shop(url, K1)).lifespan():
        await everything(shop, "sealed")
        await shop.post("/inline", "sealed-lost-0000000000", fail=True)


@pytest.mark.parametrize("text", ["k1", "k1:", "k1:AAAA", "k 1:" + b64encode(OLD).decode(), ",", f"{VARIABLE['k1']},x"])
def test_invalid_seal_keys_variable_is_rejected_without_its_value(text):
    with pytest.raises(Exception, match="ONCEKEY_SEAL_KEYS must be NAME:BASE64") as told:
        from_environment({"ONCEKEY_SEAL_KEYS": text})
    assert b64encode(OLD).decode() not in str(told.value)


def test_the_first_key_of_the_variable_seals():
    made = from_environment({"ONCEKEY_SEAL_KEYS": f"{VARIABLE['k2']}, {VARIABLE['k1']}"})
    assert made is not None
    assert (made.current, set(made.names)) == ("k2", {"k1", "k2"})
    assert from_environment({}) is None
