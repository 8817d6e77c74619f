"""A client that is killed while it works, on a bad network: every operation happens once and gets its answer."""

from __future__ import annotations

from soak.client_soak import soak


def test_client_killed_6_times_creates_exactly_60_orders(tmp_path):
    # R217, R220, R225
    result = soak(tmp_path, operations=60, kills=6, seed=7)
    assert result.orders == {f"cus_{number}": 1 for number in range(60)}
    assert result.statuses == {201: 60}
    assert result.same_ids, "every answer is that of the order it stands for"
    assert sum(result.unfinished[:-1]) > 0, "it was killed while there was something to resume"
    assert result.unfinished[-1] == 0
