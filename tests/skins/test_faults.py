"""The fault format on every framework: the trace of the client's `traceparent` is in the body."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.provider import Provider
from skins.rows import ON_SQLITE, SKINS
from skins.stage import Stage, new_key

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
WITHOUT_STATUS = frozenset({"asgi", "example"})
TRACED = {"Traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


@pytest.mark.parametrize("name", sorted(ON_SQLITE))
def test_a_fault_names_the_trace_of_its_request(name: str, tmp_path: Path, provider: Provider) -> None:
    # R232
    with Stage(SKINS[name], f"sqlite:///{tmp_path}/shop.db", tmp_path, provider, errors="fault") as stage:
        key = new_key()
        assert stage.send("/charges", {"item": "tea"}, key=key).status == 201
        for order, its_key in (({"item": "milk"}, key), ({}, ""), ({}, "short"), ({"status": 429}, new_key())):
            fault = stage.send("/charges", order, key=its_key, headers=TRACED).json()["fault"]
            assert (fault["traceId"], len(fault["faultId"])) == (TRACE, 32)
        for header in ({}, {"Traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, {"Traceparent": "nonsense"}):
            fault = stage.send("/charges", {"item": "milk"}, key=key, headers=header).json()["fault"]
            assert fault["traceId"] == ""
        if name not in WITHOUT_STATUS:
            for headers, trace in ((TRACED, TRACE), ({}, "")):
                absent = stage.status(new_key(), headers=headers)
                assert (absent.status, absent.json()["fault"]["traceId"]) == (404, trace)
            assert stage.status(key).json()["state"] == "completed"
