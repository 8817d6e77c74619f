"""The tools of the page, on the official SDK: one execution for all tries, and a client that gives up."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer

from harness.pages import ROOT, Page, load
from oncekey import LOCAL, ConfigurationError, Once, Operation, SyncOperation
from oncekey.mcp import KEY, NO_KEY, tool


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (block,) = Page(ROOT / "docs/howto/mcp.md").blocks("python")
    with closing(sqlite3.connect("payments.db")) as connection:
        connection.execute("CREATE TABLE payments (id INTEGER PRIMARY KEY, customer TEXT, amount INTEGER)")
    return load(block.text, "tools.py", tmp_path, monkeypatch)


def rows() -> int:
    with closing(sqlite3.connect("payments.db")) as connection:
        ((number,),) = connection.execute("SELECT count(*) FROM payments").fetchall()
    return int(number)


def text(result: Any) -> str:
    return " ".join(part.text for part in result.content)


async def test_a_tool_runs_once_per_key(page: Any) -> None:
    async with Client(page.server) as client:
        (listed,) = (await client.list_tools()).tools
        assert [*listed.input_schema["properties"]] == ["customer", "amount"]
        ann, key = {"customer": "ann", "amount": 7}, {KEY: "call-1"}
        paid = [await client.call_tool("pay", ann, meta=key) for _ in range(3)]
        assert [one.structured_content for one in paid] == [{"id": 1}] * 3
        keyless = await client.call_tool("pay", ann)
        assert (keyless.is_error, NO_KEY in text(keyless)) == (True, True)
        other = await client.call_tool("pay", {**ann, "amount": 8}, meta=key)
        assert (other.is_error, "belongs to a call with other arguments" in text(other)) == (True, True)
        for _ in range(2):
            no = await client.call_tool("pay", {**ann, "amount": 2000}, meta={KEY: "call-2"})
            assert (no.is_error, "at most 1000" in text(no)) == (True, True)
    assert rows() == 1


async def test_a_tool_keeps_running_after_its_client_cancels(tmp_path: Path) -> None:
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True)
    server, entered, go_on = MCPServer("slow", lifespan=once.lifespan), asyncio.Event(), asyncio.Event()

    @server.tool()
    @tool
    @once.function(key="order", effects=LOCAL, operation="slow")
    async def slow(op: Operation, order: str) -> str:
        entered.set()
        await go_on.wait()
        return f"{order} {op.attempt}"

    async with Client(server) as client:
        calling = asyncio.create_task(client.call_tool("slow", {"order": "o-1"}))
        await entered.wait()
        calling.cancel()  # as the SDK does to the tool of a client that has waited for too long
        busy = await client.call_tool("slow", {"order": "o-1"})
        assert "call it again with the same key in 1 seconds" in text(busy)
        go_on.set()
        await asyncio.wait([calling])
        assert text(await client.call_tool("slow", {"order": "o-1"})) == "o-1 1"


def test_the_order_of_decorators_is_checked(tmp_path: Path) -> None:
    once = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True)
    with pytest.raises(ConfigurationError, match=r"put @tool above @once.function\(...\), and below @server.tool\(\)"):
        tool(lambda order: order)

    @tool
    @once.function(key="order", effects=LOCAL, operation="plain")
    def plain(op: SyncOperation, order: str) -> str:
        return order

    assert plain("o-1") == "o-1"
    with pytest.raises(Exception, match="key='order' must be text") as refused:
        plain(7)  # type: ignore[arg-type]
    assert type(refused.value).__name__ == "ToolError"
    once.blocking().close()
