"""A real JetStream: a consumer dies after its commit and before its acknowledgement, and the message comes again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import nats
import psycopg
from nats.js.api import ConsumerConfig

from harness.brokers import Nats
from harness.pages import ROOT, Page

STORE = "postgresql+asyncpg://localhost/shop"


async def test_a_message_whose_acknowledgement_is_lost_is_handled_once(functions_dsn: str, tmp_path: Path) -> None:
    (page,) = [one for one in Page(ROOT / "docs/howto/functions.md").blocks("python") if one.file == "jetstream.py"]
    assert STORE in page.text
    own = functions_dsn.replace("postgresql://", "postgresql+asyncpg://")
    (tmp_path / "jetstream.py").write_text(page.text.replace(STORE, own))
    with psycopg.connect(functions_dsn, autocommit=True) as database:
        database.execute("TRUNCATE oncekey.record, oncekey.work")
        database.execute("DROP TABLE IF EXISTS stock")
        database.execute("CREATE TABLE stock AS SELECT 'tea' AS product, 10 AS amount")

    def consume(*how: str) -> subprocess.CompletedProcess[str]:
        program = Path(__file__).with_name("jetstream_consumer.py")
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, str(program), broker.url, *how]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)

    with Nats(tmp_path / "streams") as broker:
        async with await nats.connect(broker.url) as client:
            streams = client.jetstream()
            await streams.add_stream(name="orders", subjects=["sold"])
            await streams.add_consumer("orders", ConsumerConfig(durable_name="stock", ack_wait=1))
            await streams.publish("sold", b'{"product": "tea"}', headers={"Nats-Msg-Id": "sale-1"})
            dead, next_one = consume("mortal"), consume()
            assert dead.returncode == -signal.SIGKILL, dead.stderr
            assert next_one.stdout.split()[0] == "duplicate", next_one.stderr
            while (left := await streams.consumer_info("orders", "stock")).num_ack_pending:  # noqa: ASYNC110  (of another process)
                await asyncio.sleep(0.05)  # the acknowledgement is on its way
            assert left.num_pending == 0
    with psycopg.connect(functions_dsn) as database:
        assert database.execute("SELECT amount FROM stock").fetchall() == [(9,)]
