"""The demo with its workers in another process: `oncekey worker --app oncekey_demo.service:once`."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from harness.demo import Demo
from harness.provider import Provider

WORKER = (sys.executable, "-c", "from oncekey.cli import main; main()", "worker", "--app", "oncekey_demo.service:once")


def test_separate_worker_process_executes_the_transfer(tmp_path: Path) -> None:
    # R122, R124
    store = f"sqlite:///{tmp_path / 'demo.db'}"
    with (
        Provider(tmp_path) as provider,
        Demo(tmp_path, "--no-workers", "--provider", provider.url, store=store) as demo,
    ):
        transfer, payment = str(uuid.uuid4()), str(uuid.uuid4())
        assert demo.post("/transfers", transfer).status_code == 202
        paid = demo.post("/payments", payment).json()
        assert demo.record(transfer)["state"] == "pending"
        assert demo.read("/receipts").json() == []
        env = {**os.environ, "ONCEKEY_DEMO_STORE": store, "ONCEKEY_DEMO_PROVIDER": provider.url}
        done = subprocess.run([*WORKER, "--once"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert demo.record(transfer)["state"] == "completed"
        charge = demo.post("/transfers", transfer).json()["charge_id"]
        assert [one["id"] for one in provider.charges()] == [paid["charge_id"], charge]
        assert [receipt["payment_id"] for receipt in demo.read("/receipts").json()] == [paid["id"]]
