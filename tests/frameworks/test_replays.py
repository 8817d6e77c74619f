"""What a repeat hears: the first answer, byte for byte, and nothing of anybody else."""

from __future__ import annotations

from frameworks.shop import Shop
from oncekey.effects import LOCAL
from oncekey.frameworks.asgi.operation import Operation


async def test_a_repeat_gets_the_first_answer_without_a_second_run() -> None:
    # R67, R87, R88, R89, R95, R98
    shop = Shop()

    @shop.post("/orders", effects=LOCAL, status_code=201)
    async def create(op: Operation) -> dict[str, int]:
        op.connection.add("row")
        return {"orders": len(op.connection.rows)}

    first = await shop.send("/orders")
    again = [await shop.send("/orders") for _ in range(3)]
    assert (first.status, first.json(), first.replayed) == (201, {"orders": 1}, False)
    assert [(reply.status, reply.body, reply.replayed) for reply in again] == [(201, first.body, True)] * 3
    assert shop.ledger.rows == ["row"]
