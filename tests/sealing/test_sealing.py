"""Nothing of a customer's is readable in a real database, and everything that worked still does (R195)."""

from __future__ import annotations

import os

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from oncekey import Once
from oncekey.console.dossier import body_of, indented
from oncekey.core.enclosing import enclose_text, sealed_answer
from oncekey.core.errors import ConfigurationError
from oncekey.core.model import StoredResponse
from oncekey.sealing import AesGcm, CannotOpenError
from sealing.looking import BOTH, K1, everything, execute, shown, tables
from sealing.shop import MARK, NEW, OLD, Shop


async def test_a_database_shows_nothing_and_replays_everything(url):
    async with (plain := Shop(url, None)).lifespan():
        await everything(plain, "plain")
        assert len(set(shown(url))) >= 3  # the search finds what is there

    async with (shop := Shop(url, K1)).lifespan():
        for table in reversed(tables(url)):
            if "migration" not in table and "oncekey" in table:
                execute(url, f"DELETE FROM {table}")
        if url.startswith("sqlite"):
            execute(url, "VACUUM")
            execute(url, "PRAGMA wal_checkpoint(TRUNCATE)")
        replies = await everything(shop, "sealed")
        assert shown(url) == []
        runs = list(shop.runs)
        accepted = await shop.post("/outbox", "sealed-outbox-0000000000")
        assert (accepted.status, accepted.json()) == (202, {"accepted": {"name": MARK}})
        assert accepted.body == replies["outbox"].body
        for path in ("local", "inline", "phased"):
            again = await shop.post(f"/{path}", f"sealed-{path}-0000000000")
            assert (again.replayed, again.status, again.body) == (True, replies[path].status, replies[path].body)
            assert again.header("location") == replies[path].header("location")
        assert shop.runs == runs
        await shop.work()
        assert shop.told == [{"name": MARK}]
        done = await shop.post("/outbox", "sealed-outbox-0000000000")
        assert (done.replayed, done.json()) == (True, {"charged": {"name": MARK}})
        assert (await shop.post("/phased", "sealed-begun-0000000000")).status == 200
        assert shop.runs.count("first") == 2
        assert shown(url) == []


async def test_without_its_key_a_record_is_refused_and_not_run_again(url):
    async with (shop := Shop(url, K1)).lifespan():
        await everything(shop, "known")
    wrong = AesGcm({"k1": NEW}, current="k1")
    for seal in (None, AesGcm({"k9": NEW}, current="k9"), wrong):
        async with (other := Shop(url, seal)).lifespan():
            for path in ("local", "inline", "phased"):
                refused = await other.post(f"/{path}", f"known-{path}-0000000000")
                assert (refused.status, refused.code) == (500, "idempotency_record_unreadable")
            assert (await other.post("/phased", "known-begun-0000000000")).code == "idempotency_record_unreadable"
            accepted = await other.post("/outbox", "known-outbox-0000000000")
            assert (accepted.status, accepted.json()["state"]) == (202, "pending")  # true, though its body is sealed
            mismatch = await other.post("/local", "known-local-0000000000", other=1)
            assert mismatch.status == 422  # whose key it is, and for what, needs no seal
            await other.work()
            assert (other.runs, other.told) == ([], [])
            page = await other.post("/inline", f"fresh-{id(seal)}-0000000000")
            assert page.status == 200  # new requests go on
    # The parcels wait, uncounted, for a worker that has the key.
    execute(url, "UPDATE oncekey.outbox SET due_at = 0")
    assert {row[0] for row in execute(url, "SELECT attempts FROM oncekey.outbox")} <= {0, 1}
    async with (owner := Shop(url, K1)).lifespan():
        await owner.work()
        assert {"name": MARK} in owner.told
        assert (await owner.post("/outbox", "known-outbox-0000000000")).replayed
        assert (await owner.post("/phased", "known-begun-0000000000")).status == 200


async def test_content_stored_before_sealing_stays_readable(url):
    async with (plain := Shop(url, None)).lifespan():
        replies = await everything(plain, "plain")
    async with (shop := Shop(url, K1)).lifespan():
        again = await shop.post("/local", "plain-local-0000000000")
        assert (again.replayed, again.body) == (True, replies["local"].body)
        assert (await shop.post("/phased", "plain-begun-0000000000")).status == 200
        assert "first" not in shop.runs
        await shop.work()
        assert (await shop.post("/outbox", "plain-outbox-0000000000")).replayed


async def test_bytes_that_were_moved_to_another_row_do_not_open(url):
    async with (shop := Shop(url, K1)).lifespan():
        await shop.post("/inline", "mine-0000000000000000")
        await shop.post("/inline", "yours-000000000000000")
        ((body,),) = execute(url, "SELECT response_body FROM oncekey.record WHERE key = %s", "mine-0000000000000000")
        execute(
            url, "UPDATE oncekey.record SET response_body = %s WHERE key = %s", bytes(body), "yours-000000000000000"
        )
        moved = await shop.post("/inline", "yours-000000000000000")
        assert (moved.status, moved.code) == (500, "idempotency_record_unreadable")
        assert (await shop.post("/inline", "mine-0000000000000000")).replayed
        assert shop.runs == ["inline", "inline"]


async def test_an_old_key_opens_and_the_new_one_seals(url):
    async with (shop := Shop(url, K1)).lifespan():
        first = await everything(shop, "older")
    async with (shop := Shop(url, BOTH)).lifespan():
        again = await shop.post("/local", "older-local-0000000000")
        assert (again.replayed, again.body) == (True, first["local"].body)
        assert (await shop.post("/phased", "older-begun-0000000000")).status == 200  # steps under both keys
        await shop.post("/local", "newer-local-0000000000")
        for key, name in (("older-local-0000000000", "k1"), ("newer-local-0000000000", "k2")):
            ((headers,),) = execute(url, "SELECT response_headers FROM oncekey.record WHERE key = %s", key)
            assert name in headers
        assert (await shop.post("/phased", "older-begun-0000000000")).replayed


def test_the_same_content_in_another_place_looks_different():
    name, sealed = K1.seal(b"content", b"here")
    assert K1.seal(b"content", b"here") == (name, sealed)
    assert K1.seal(b"content", b"there")[1] != sealed
    assert K1.open(name, sealed, b"here") == b"content"
    for key, closed, about in (
        ("k1", sealed, b"there"),
        ("k2", sealed, b"here"),
        ("k1", sealed[:-1], b"here"),
        ("k1", b"", b"here"),
        ("k1", sealed[:-1] + bytes([sealed[-1] ^ 1]), b"here"),
    ):
        with pytest.raises(CannotOpenError):
            K1.open(key, closed, about)
    assert OLD.hex() not in repr(K1)


class Service:
    """A seal of an application's own, which gives other bytes each time, and may be out of reach."""

    current, names = "svc", ("svc",)
    down = False

    def __init__(self) -> None:
        self._cipher = AESGCM(OLD)

    def seal(self, plain, about):
        if self.down:
            raise TimeoutError
        nonce = os.urandom(12)
        return "svc", nonce + self._cipher.encrypt(nonce, plain, about)

    def open(self, key_id, sealed, about):
        if self.down or key_id != "svc":
            raise TimeoutError
        return self._cipher.decrypt(sealed[:12], sealed[12:], about)


async def test_key_service_outage_counts_as_store_outage(url, caplog):
    seal = Service()
    async with (shop := Shop(url, seal)).lifespan():
        await everything(shop, "kept")
        assert shown(url) == []
        assert (await shop.post("/phased", "kept-begun-0000000000")).status == 200
        assert (await shop.post("/phased", "kept-begun-0000000000")).replayed
        await shop.work()
        assert (await shop.post("/outbox", "kept-outbox-0000000000")).replayed
        runs = len(shop.runs)
        seal.down = True
        refused = await shop.post("/local", "kept-local-0000000000")
        assert (refused.code, len(shop.runs)) == ("idempotency_record_unreadable", runs)
        assert "opening what is sealed under the key svc failed: TimeoutError" in caplog.text
        assert (await shop.post("/local", "lost-local-0000000000")).status == 503
        seal.down = False
        again = await shop.post("/local", "lost-local-0000000000")
        assert (again.status, again.replayed) == (200, False)  # its rows were rolled back with it


@pytest.mark.parametrize(
    ("keys", "current", "why"),
    [
        ({"k1": OLD}, "k2", "not one of the keys"),
        ({"k1": b"short"}, "k1", "not 32 bytes"),
        ({"k:1": OLD}, "k:1", "1 to 32 letters"),
        ({"k1": OLD, "k2": OLD}, "k1", "the same key"),
    ],
)
def test_invalid_seal_keys_are_rejected_at_construction(keys, current, why):
    with pytest.raises(ConfigurationError, match=why):
        AesGcm(keys, current=current)


def test_invalid_seal_is_rejected_at_construction():
    with pytest.raises(ConfigurationError, match="seal= takes"):
        Once("sqlite:///unused.db", seal=object())  # type: ignore[arg-type]


def test_console_labels_sealed_content():
    closed = sealed_answer(StoredResponse(200, (), b"x"), "k1", b"...")
    assert body_of(closed) == indented(enclose_text("k1", b"...")) == "sealed under the key k1"
