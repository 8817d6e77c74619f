"""A client that is killed again and again, before a demo whose network loses, delays, truncates and resets at random.

    python tests/soak/client_soak.py --operations 1000 --kills 50

Every operation must happen exactly once and get its answer. `tests/client/test_killed.py` runs a small one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from harness.demo import ALPHA, Demo
from harness.proxy import Proxy
from oncekey_client import Backoff, ClientError, Journal, RetryRules
from oncekey_client.httpx import AsyncOncekeyTransport

AT_ONCE = 4
_POLL = 0.02
_PATIENCE = 600.0
_REQUEST = b"POST /orders"
RULES = RetryRules(attempts=8, deadline=30.0, backoff=Backoff(base=0.02, cap=0.2, floor=0.01, longest=0.3))


@dataclass(frozen=True)
class Result:
    """What was seen: orders by operation, answers by the journal, and how much was unfinished at the kills."""

    orders: Counter[str]
    statuses: Counter[int]
    same_ids: bool
    unfinished: tuple[int, ...]
    seconds: float


async def work(url: str, path: str, operations: int) -> None:
    """The client: it knows its list of operations, and what the journal remembers of them."""
    transport = AsyncOncekeyTransport(journal=Journal(path), rules=RULES)
    headers = {"Authorization": f"Bearer {ALPHA}"}
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=5.0) as client:
        await transport.resume(lambda _: headers)

        async def place(number: int) -> None:
            body = {"customer_id": f"cus_{number}", "items": [{"product_id": "sku_teapot", "quantity": 1}]}
            async with room:
                while True:
                    try:
                        answer = await client.post("/orders", json=body, headers={"Oncekey-Operation": f"op-{number}"})
                    except (ClientError, httpx.TransportError):
                        continue
                    if answer.status_code == httpx.codes.CREATED:
                        return

        await asyncio.gather(*(place(number) for number in range(operations)))


def soak(folder: Path, *, operations: int, kills: int, seed: int) -> Result:
    """Run it, and return what is there in the end."""
    chance = random.Random(seed)
    journal = Journal(folder / "journal.db")
    thresholds = sorted(chance.sample(range(1, operations), kills))
    unfinished: list[int] = []
    begun = time.monotonic()
    with Demo(folder) as demo, Proxy("127.0.0.1", demo.port) as proxy:
        command = [sys.executable, __file__, "--client", f"http://127.0.0.1:{proxy.port}", str(journal.path)]
        for threshold in [*thresholds, None]:
            process = subprocess.Popen([*command, "--operations", str(operations)])
            try:
                _disturb(proxy, process, journal, threshold, chance)
            finally:
                process.kill()
                process.wait()
            unfinished.append(len(journal.unfinished()))
        orders = demo.orders()
    answers = [entry.reply for entry in journal.entries() if entry.reply is not None]
    ids = {json.loads(answer.body)["id"] for answer in answers}
    return Result(
        Counter(str(order["customer_id"]) for order in orders),
        Counter(answer.status for answer in answers),
        ids == {order["id"] for order in orders},
        tuple(unfinished),
        time.monotonic() - begun,
    )


def _disturb(
    proxy: Proxy, process: subprocess.Popen[bytes], journal: Journal, threshold: int | None, chance: random.Random
) -> None:
    """Make the network bad until so many operations are answered, or until the client is done."""
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None:
        assert time.monotonic() < deadline, "the client does not come to an end"
        if threshold is not None and _answered(journal) >= threshold:
            time.sleep(chance.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
            return
        match chance.randrange(16):
            case 0:
                proxy.lose_reply(_REQUEST)
            case 1:
                proxy.lose_request(_REQUEST)
            case 2:
                proxy.cut()
            case 3:
                proxy.delay(chance.uniform(0, 0.05))
            case 4:
                proxy.lose_reply(_REQUEST, keep=chance.randrange(1, 300))
        time.sleep(_POLL)
    assert process.returncode == 0, f"the client ended with {process.returncode}"
    proxy.delay(0)


def _answered(journal: Journal) -> int:
    return sum(entry.reply is not None for entry in journal.entries())


def main() -> None:
    """Soak, or be the client of a soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--client", nargs=2, metavar=("URL", "JOURNAL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(work(*options.client, options.operations))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), operations=options.operations, kills=options.kills, seed=options.seed)
    twice = [name for name, count in result.orders.items() if count > 1]
    print(
        f"{options.operations} operations, {options.kills} kills with {sum(result.unfinished)} operations under way: "
        f"{result.orders.total()} orders, {len(twice)} of them twice, {result.statuses[201]} answers, "
        f"{result.seconds:.0f} s"
    )
    good = result.orders.total() == len(result.orders) == result.statuses[201] == options.operations
    raise SystemExit(0 if good and result.same_ids else 1)


if __name__ == "__main__":
    main()
