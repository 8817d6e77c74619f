"""What cannot be protected is refused at decoration, by one sentence that says what to do."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import create_async_engine

from oncekey import (
    INLINE,
    LOCAL,
    OUTBOX,
    PHASED,
    SINGLE_TENANT,
    ConfigurationError,
    KeyReusedError,
    Once,
    Operation,
    Policy,
    Selection,
    SyncOperation,
)

if TYPE_CHECKING:
    from decimal import Decimal as Money

once = Once("memory:")


def plain(key: str, amount: int = 0) -> int:
    return amount


def stream(key: str) -> Any:
    yield key


async def astream(key: str) -> Any:
    yield key


@functools.wraps(stream)
def wrapped_stream(*args: Any) -> Any:
    return stream(*args)


def numbered(key: int) -> None: ...


def later(key: str) -> Money: ...


def later_argument(key: str, amount: Money) -> None: ...


def with_client(key: str, client: object) -> None: ...


def wrong_kind(op: Operation, key: str) -> None: ...


class Till:
    def sell(self, key: str) -> None: ...


def closure() -> Any:
    rate = 7

    def pay(key: str) -> int:
        return rate

    return pay


class Called:
    async def __call__(self, key: str) -> None: ...


@once.function(key="key", effects=LOCAL)
def protected(key: str) -> None: ...


MISUSES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "generator": (stream, {}, "stream is a generator: calling it runs none of it"),
    "async generator": (astream, {}, "astream is a generator"),
    "wrapped generator": (wrapped_stream, {}, "stream is a generator"),
    "lambda": (lambda key: key, {}, "has no name that is the same in every process"),
    "closure without a name": (closure(), {}, r"name it with @once.function\(operation=...\)"),
    "closure that is resumed": (
        closure(),
        {"effects": PHASED, "operation": "pay"},
        "pay uses rate of the enclosing function.*or set complete=False",
    ),
    "method that is resumed": (Till.sell, {"effects": PHASED}, "has no value for self"),
    "ignored that is resumed": (
        with_client,
        {"effects": PHASED, "ignore": ("client",)},
        "a worker that resumes it has no value for client",
    ),
    "annotation that is resumed": (later_argument, {"effects": PHASED}, "the annotation 'Money' of amount cannot be"),
    "result": (later, {}, r"the annotation 'Money' of its result cannot be resolved.*pass its type, result=\.\.\."),
    "classmethod": (classmethod(plain), {}, r"put @classmethod above @once.function\(...\)"),
    "staticmethod": (staticmethod(plain), {}, "put @staticmethod above"),
    "partial": (functools.partial(plain, amount=1), {}, "above a `def` or `async def` function, and this is a partial"),
    "object": (Called(), {}, "and this is a Called"),
    "class": (Till, {}, "and this is a type"),
    "twice": (protected, {}, "protected is already protected"),
    "no key": (plain, {"key": None}, "give the name of the parameter that holds the key"),
    "key elsewhere": (plain, {"key": "order"}, "key names 'order', but the parameters are key, amount"),
    "key of others": (plain, {"key": lambda order: order}, "key names 'order'"),
    "key of nothing": (plain, {"key": 7}, "key is the name of a parameter, or a function of parameters"),
    "number as key": (numbered, {}, "key='key' must be text, but the parameter is of type int"),
    "number as tenant": (plain, {"tenant": "amount"}, "tenant='amount' must be text"),
    "ignored elsewhere": (plain, {"ignore": ("nobody",)}, "ignore names 'nobody'"),
    "two names": (plain, {"operation": "protected"}, "two operations have the name protected"),
    "wrong operation": (wrong_kind, {}, "so annotate op as SyncOperation, not Operation"),
    "setting of HTTP": (plain, {"header_syntax": "bare"}, "takes no header_syntax; the closest is"),
    "setting of all": (plain, {"reap_batch": 5}, "takes no reap_batch"),
    "setting of others": (plain, {"complete": False}, "complete has no effect with effects=LOCAL: it is for PHASED"),
    "202": (plain, {"on_in_progress": "accepted"}, "on_in_progress='accepted' is an HTTP response"),
    "loose": (plain, {"effects": INLINE, "on_store_error": "fail_open"}, "set naturally_idempotent=True"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_one_sentence_at_decoration(name: str) -> None:
    function, options, sentence = MISUSES[name]
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        once.function(**{"key": "key", "effects": LOCAL, **options})(function)
    assert "\n" not in str(refused.value)
    assert list(once.enrolled) == ["protected"]


def test_missing_effects_raise_at_decoration() -> None:
    with pytest.raises(TypeError, match=r"@once.function\(effects=...\): declare the handler's side effects"):
        once.function(key="key", effects=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"@once.inbox\(effects=...\)"):
        once.inbox(consumer="billing", effects=None)  # type: ignore[arg-type]


def test_inbox_requires_a_consumer_name() -> None:
    with pytest.raises(ConfigurationError, match="give the consumer a name"):
        once.inbox(effects=LOCAL)(plain)
    with pytest.raises(ConfigurationError, match="takes no operation"):
        once.inbox(effects=LOCAL, consumer="billing", operation="x")(plain)  # type: ignore[call-arg]


def test_a_handler_cannot_be_both_route_and_function() -> None:
    with pytest.raises(ConfigurationError, match=r"protected is already protected by @once.function"):
        once.protect(effects=LOCAL)(protected)

    def route(op: SyncOperation) -> None: ...

    enrolled = once.protect(effects=LOCAL, operation="route")(route)
    try:
        with pytest.raises(ConfigurationError, match="is already protected"):
            once.function(key="key", effects=LOCAL)(enrolled)
    finally:
        del once.enrolled["route"]


def test_functions_ignore_http_policy_settings(tmp_path: Path) -> None:
    policy = Policy(
        on_in_progress="accepted",  # type: ignore[arg-type]
        selection=Selection(exclude=("amount",)),
        key_format="uuid",  # type: ignore[arg-type]
        bind_to="principal",  # type: ignore[arg-type]
    )
    shop = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True, policy=policy)
    buy = shop.function(key="key", effects=LOCAL)(plain)  # type: ignore[arg-type]
    assert buy("7", 1) == 1
    with pytest.raises(KeyReusedError):
        buy("7", 2)
    shop.blocking().close()


def test_threads_need_blocking_connections() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(ConfigurationError, match="plain: effects=LOCAL on a plain `def` handler needs a blocking"):
        Once(engine).function(key="key", effects=LOCAL)(plain)


async def test_an_application_with_functions_starts(tmp_path: Any) -> None:
    shop, app = Once(f"sqlite:///{tmp_path}/shop.db", migrate=True), FastAPI()
    shop.install(app, tenant=SINGLE_TENANT)
    buy = shop.function(key="key", effects=LOCAL)(plain)
    shop.function(key="key", effects=OUTBOX, operation="deferring")(plain)
    assert [(name, one.__oncekey__.effects) for name, one in shop.enrolled.items()] == [  # type: ignore[attr-defined]
        ("plain", LOCAL),
        ("deferring", OUTBOX),
    ]
    async with shop.lifespan(app):  # no route serves them, and none has to
        assert await asyncio.to_thread(buy, "k", 7) == 7
    threads = shop._functions.threads
    assert threads is not None
    assert threads.stop(10)
    shop.blocking().close()
