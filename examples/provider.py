"""A simulated payment provider: it charges once per key, as Stripe does, and keeps its ledger in a SQLite file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

LEDGER = Path("provider.db")


def charge(cents: int, *, key: str) -> dict[str, Any]:
    """Create a charge, or return the existing one of this key."""
    with closing(_ledger()) as ledger, ledger:
        ledger.execute("INSERT OR IGNORE INTO charge (key, cents) VALUES (?, ?)", (key, cents))
        number, charged = ledger.execute("SELECT rowid, cents FROM charge WHERE key = ?", (key,)).fetchone()
    return {"id": f"ch_{number}", "cents": charged}


def charges() -> list[tuple[str, int]]:
    """All charges in the ledger: id and amount."""
    with closing(_ledger()) as ledger:
        return ledger.execute("SELECT 'ch_' || rowid, cents FROM charge ORDER BY rowid").fetchall()


def _ledger() -> sqlite3.Connection:
    ledger = sqlite3.connect(LEDGER, timeout=30)
    ledger.execute("CREATE TABLE IF NOT EXISTS charge (key TEXT UNIQUE NOT NULL, cents INTEGER NOT NULL)")
    return ledger
