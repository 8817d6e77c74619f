"""Messages of a phased handler: each commits with its phase, and is the same whoever comes to write it (R123, D1)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import OUTBOX, PHASED
from phased.bank import Bank, Call, Here, Phase


def telling(topic: str, times: int = 1) -> Any:
    def inside(op: Any) -> None:
        for _ in range(times):
            op.emit(topic, {"about": topic})

    return inside


def script(op: Any) -> Generator[Any, Any, Any]:
    yield Phase("order", inside=telling("ordered", 2))
    yield Here("order")
    yield Call()
    yield Phase("paid", inside=telling("paid"))
    return 201


def parcels(bank: Bank) -> list[tuple[str, str]]:
    return sorted(bank.execute("SELECT aggregatetype, downstream_key FROM {outbox}"))


async def test_a_message_commits_with_its_phase(bank: Bank) -> None:
    async with bank.process(script) as dead, bank.process(script) as alive:
        await dead.send_and_freeze("order")
        assert [topic for topic, _ in parcels(bank)] == ["ordered", "ordered"]
        bank.lease_over()
        assert (await alive.send()).status == 201
        resumed = parcels(bank)
        assert [topic for topic, _ in resumed] == ["ordered", "ordered", "paid"]
        assert len({key for _, key in resumed}) == 3
        # The record was lost, and the same request comes again: whoever receives them recognises every message.
        bank.execute("DELETE FROM {record}")
        bank.execute("DELETE FROM {outbox}")
        assert (await alive.send()).status == 201
        assert parcels(bank) == resumed


async def test_a_rolled_back_phase_emits_nothing(mixed_bank: Bank) -> None:
    bank = mixed_bank
    fails = iter([RuntimeError(), None])

    def failing(op: Any) -> Generator[Any, Any, Any]:
        yield Phase("order", inside=telling("ordered"), fails=next(fails))
        return 201

    async with bank.process(failing) as process:
        assert (await process.send()).status == 500
        assert parcels(bank) == []
        assert (await process.send()).status == 201
    assert len(parcels(bank)) == 1


async def test_emit_outside_a_phase_raises(small_bank: Bank) -> None:
    # H1, F28
    said: list[str] = []

    def outside(op: Any) -> Generator[Any, Any, Any]:
        yield Phase("order")
        for wrong in (lambda: op.emit("ordered", {}), lambda: op.defer("ship", {}), lambda: op.connection):
            try:
                wrong()
            except ConfigurationError as error:
                said.append(str(error))
        return 201

    async with small_bank.process(outside) as process:
        assert (await process.send()).status == 201
    assert ["inside op.phase" in said[0], "effects=OUTBOX" in said[1], "op.phase" in said[2]] == [True] * 3
    assert parcels(small_bank) == []


@pytest.mark.parametrize("effects", [PHASED, OUTBOX])
async def test_phased_and_outbox_routes_require_a_key(small_bank: Bank, effects: Any) -> None:
    with pytest.raises(ConfigurationError, match="a request is resumed by its key, so every request needs one"):
        async with small_bank.process(effects=effects, require_key=False):
            pass
