"""The measurements: servers, requests, and the pairs of variants that make a ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from bench.figures import BenchError


class Store(Enum):
    """Where an application stores its rows."""

    NONE = "none"
    POSTGRES = "postgres"
    POSTGRES_AND_REDIS = "postgres+redis"
    SQLITE = "sqlite"


class Sends(Enum):
    """The key of a request."""

    NO_KEY = "no key"
    NEW = "a new key each"
    REPLAY = "keys whose responses this process stored"
    ELSEWHERE = "keys whose responses another process stored, each once"


@dataclass(frozen=True, slots=True)
class Place:
    """A server process: an application of `bench/served`, and the interpreter and the store that it needs."""

    name: str
    app: str
    store: Store = Store.POSTGRES
    peer: str | None = None
    """The peer in whose environment it runs; None: oncekey's."""
    shares: str | None = None
    """The place whose database it shares."""
    before: bool = False
    """Whether it serves the sources of the baseline."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of request to one place."""

    name: str
    title: str
    group: str
    place: str
    path: str = "/orders"
    sends: Sends = Sends.NEW
    status: int = 201
    replayed: str = "idempotent-replayed"
    """The header that only replays have; empty if there is none."""
    table: str | None = None
    """The table in which an executed request leaves one row; for a replay, the request that created its key."""


class By(Enum):
    """What a ratio compares first; the other is shown next to it."""

    CPU = "cpu"
    RATE = "rate"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two variants of the same round. More is better: 1 is as fast, or as cheap, as the base."""

    name: str
    title: str
    ours: str
    base: str
    by: By


ORDERS, PAYMENTS = "bench_order", "bench_payment"

PLACES = (
    Place("bare", "bare", Store.NONE),
    Place("stock", "stock"),
    Place("stock_sqlalchemy", "stock_sqlalchemy"),
    Place("asyncpg", "asyncpg"),
    Place("elsewhere", "asyncpg", shares="asyncpg"),
    Place("cached", "asyncpg_cached"),
    Place("shared", "asyncpg_shared", Store.POSTGRES_AND_REDIS),
    Place("shared_elsewhere", "asyncpg_shared", Store.POSTGRES_AND_REDIS, shares="shared"),
    Place("psycopg", "psycopg"),
    Place("sqlalchemy", "sqlalchemy"),
    Place("sqlite", "sqlite", Store.SQLITE),
    Place("idemkit", "idemkit", peer="idemkit"),
    Place("header_memory", "header_memory", peer="asgi-idempotency-header"),
    Place("header_redis", "header_redis", Store.POSTGRES_AND_REDIS, peer="asgi-idempotency-header"),
    Place("dbos", "dbos", peer="dbos"),
)

# Neighbours in this list run one after the other, so compared variants are close together.
VARIANTS = (
    Variant("bare", "bare route, no database", "plain", "bare", "/bare", Sends.NO_KEY),
    Variant("passing", "unprotected path behind the middleware", "plain", "asyncpg", "/bare", Sends.NO_KEY),
    Variant("replay", "replay of this process's response", "replay", "asyncpg", sends=Sends.REPLAY, table=ORDERS),
    Variant(
        "replay-elsewhere",
        "replay of another process's response",
        "replay",
        "elsewhere",
        sends=Sends.ELSEWHERE,
        table=ORDERS,
    ),
    Variant("replay-cached", "replay, with the response cache", "replay", "cached", sends=Sends.REPLAY, table=ORDERS),
    Variant(
        "replay-shared",
        "replay, with the response cache in Redis",
        "replay",
        "shared",
        sends=Sends.REPLAY,
        table=ORDERS,
    ),
    Variant(
        "replay-shared-elsewhere",
        "replay of another process's response, with the cache in Redis",
        "replay",
        "shared_elsewhere",
        sends=Sends.ELSEWHERE,
        table=ORDERS,
    ),
    Variant(
        "idemkit-replay",
        "idemkit, replay",
        "replay",
        "idemkit",
        sends=Sends.REPLAY,
        replayed="idempotency-replayed",
        table=ORDERS,
    ),
    Variant(
        "header-memory-replay",
        "asgi-idempotency-header in memory, replay",
        "replay",
        "header_memory",
        sends=Sends.REPLAY,
        table=ORDERS,
    ),
    Variant(
        "header-redis-replay",
        "asgi-idempotency-header on Redis, replay",
        "replay",
        "header_redis",
        sends=Sends.REPLAY,
        table=ORDERS,
    ),
    Variant("stock", "unprotected, asyncpg's own pool", "local", "stock", sends=Sends.NO_KEY, table=ORDERS),
    Variant("local", "LOCAL, new key, asyncpg", "local", "asyncpg", table=ORDERS),
    Variant(
        "idemkit", "idemkit on PostgreSQL, new key", "local", "idemkit", replayed="idempotency-replayed", table=ORDERS
    ),
    Variant("unkeyed", "the LOCAL route without a key, asyncpg", "local", "asyncpg", sends=Sends.NO_KEY, table=ORDERS),
    Variant("stock-again", "unprotected, once more", "local", "stock", sends=Sends.NO_KEY, table=ORDERS),
    Variant("local-cached", "LOCAL, new key, with the response cache", "local", "cached", table=ORDERS),
    Variant("local-shared", "LOCAL, new key, with cache and hints in Redis", "local", "shared", table=ORDERS),
    Variant("header-memory", "asgi-idempotency-header in memory, new key", "local", "header_memory", table=ORDERS),
    Variant("header-redis", "asgi-idempotency-header on Redis, new key", "local", "header_redis", table=ORDERS),
    Variant(
        "psycopg-unkeyed",
        "the LOCAL route without a key, psycopg",
        "drivers",
        "psycopg",
        sends=Sends.NO_KEY,
        table=ORDERS,
    ),
    Variant("psycopg", "LOCAL, new key, psycopg", "drivers", "psycopg", table=ORDERS),
    Variant(
        "stock-sqlalchemy",
        "unprotected, SQLAlchemy's session",
        "drivers",
        "stock_sqlalchemy",
        sends=Sends.NO_KEY,
        table=ORDERS,
    ),
    Variant("sqlalchemy", "LOCAL, new key, SQLAlchemy's session", "drivers", "sqlalchemy", table=ORDERS),
    Variant(
        "sqlite-unkeyed", "SQLite, the LOCAL route without a key", "sqlite", "sqlite", sends=Sends.NO_KEY, table=ORDERS
    ),
    Variant("sqlite", "SQLite, LOCAL, new key", "sqlite", "sqlite", table=ORDERS),
    Variant("sqlite-replay", "SQLite, replay", "sqlite", "sqlite", sends=Sends.REPLAY, table=ORDERS),
    Variant("inline", "INLINE, new key", "effects", "asyncpg", "/inline"),
    Variant("outbox", "OUTBOX, new key", "effects", "asyncpg", "/outbox", status=202, table=ORDERS),
    Variant("phased", "PHASED, new key: two phases and a call", "effects", "asyncpg", "/phased", table=PAYMENTS),
    Variant(
        "dbos", "DBOS, new key: two transactions and a step", "effects", "dbos", "/phased", replayed="", table=PAYMENTS
    ),
    Variant("dbos-replay", "DBOS, replay", "effects", "dbos", "/phased", Sends.REPLAY, replayed="", table=PAYMENTS),
)

RATIOS = (
    # The same request measured twice: the distance of this ratio from 1 is the noise of the run.
    Ratio("again/stock", "unprotected write / the same write again (noise)", "stock-again", "stock", By.CPU),
    Ratio("local/stock", "LOCAL new key / unprotected write on asyncpg's own pool", "local", "stock", By.CPU),
    Ratio("local/unkeyed", "LOCAL new key / the same route without a key", "local", "unkeyed", By.CPU),
    Ratio("local/idemkit", "LOCAL new key / idemkit on PostgreSQL, new key", "local", "idemkit", By.RATE),
    Ratio("local/header-redis", "LOCAL new key / asgi-idempotency-header on Redis", "local", "header-redis", By.RATE),
    Ratio(
        "psycopg/unkeyed", "LOCAL new key, psycopg / the same route without a key", "psycopg", "psycopg-unkeyed", By.CPU
    ),
    Ratio("sqlalchemy/stock", "LOCAL new key, SQLAlchemy / its own session", "sqlalchemy", "stock-sqlalchemy", By.CPU),
    Ratio("replay/bare", "replay / bare route", "replay", "bare", By.RATE),
    Ratio("replay-elsewhere/bare", "another process's replay / bare route", "replay-elsewhere", "bare", By.RATE),
    Ratio("replay-cached/bare", "replay from the cache / bare route", "replay-cached", "bare", By.RATE),
    Ratio("replay-cached/replay", "replay from the cache / from PostgreSQL", "replay-cached", "replay", By.RATE),
    Ratio("replay-shared/replay", "replay from Redis / from PostgreSQL", "replay-shared", "replay", By.RATE),
    Ratio(
        "replay-shared-elsewhere/replay-elsewhere",
        "replay of another process's response, from Redis / from PostgreSQL",
        "replay-shared-elsewhere",
        "replay-elsewhere",
        By.RATE,
    ),
    Ratio("local-shared/local", "LOCAL new key, with Redis in front / without", "local-shared", "local", By.CPU),
    Ratio("idemkit-replay/bare", "idemkit's replay / bare route", "idemkit-replay", "bare", By.RATE),
    Ratio("replay/idemkit-replay", "replay / idemkit's replay", "replay", "idemkit-replay", By.RATE),
    Ratio("passing/bare", "unprotected path behind the middleware / bare route", "passing", "bare", By.CPU),
    Ratio("sqlite/unkeyed", "SQLite new key / the same route without a key", "sqlite", "sqlite-unkeyed", By.RATE),
    Ratio("phased/dbos", "PHASED new key / DBOS with as many steps", "phased", "dbos", By.RATE),
)


WORKERS = {
    "drain": "workers empty the outbox, unordered and in 200 ordered queues",
    "reap": "a reaper during a load",
}
"""The measurements of workers."""


def named(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The chosen variants, by name or group, and worker measurements; without names, all of them."""
    known = {word for variant in VARIANTS for word in (variant.name, variant.group)}
    chosen_words = [word for word in words if word]
    for word in chosen_words:
        if word not in known | set(WORKERS):
            raise BenchError(f"--only {word}: known are {', '.join(sorted(known | set(WORKERS)))}")
    if not chosen_words:
        return sorted({variant.group for variant in VARIANTS}), list(WORKERS)
    return [word for word in chosen_words if word in known], [word for word in chosen_words if word in WORKERS]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The variants and ratios of one run."""

    places: tuple[Place, ...]
    variants: tuple[Variant, ...]
    ratios: tuple[Ratio, ...]


def chosen(only: Sequence[str], *, peers: bool = True, baseline: bool = False) -> Chosen:
    """The variants with these names or groups, and those that they are compared with.

    With a baseline each variant of oncekey is also measured with the older sources.
    """
    served = {place.name: place for place in PLACES}
    wanted = {variant.name for variant in VARIANTS if {variant.name, variant.group} & set(only)}
    wanted |= {ratio.base for ratio in RATIOS if ratio.ours in wanted}
    if "stock" in wanted:
        wanted.add("stock-again")
    variants = [
        variant for variant in VARIANTS if variant.name in wanted and (peers or served[variant.place].peer is None)
    ]
    feeding = [name for variant in variants for name in _feeding(variant, variants)]
    variants = [one for one in VARIANTS if one in variants or one.name in feeding]
    names = {variant.name for variant in variants}
    ratios = [ratio for ratio in RATIOS if {ratio.ours, ratio.base} <= names]
    places = [place for place in PLACES if place.name in {one.place for one in variants}]
    if baseline:
        places, variants, ratios = _beside_before(places, variants, ratios)
    return Chosen(tuple(places), tuple(variants), tuple(ratios))


def _feeding(variant: Variant, variants: Iterable[Variant]) -> list[str]:
    """The variant that creates the keys that another one replays, if it is not chosen yet."""
    if variant.sends is not Sends.ELSEWHERE:
        return []
    home = next(place.shares for place in PLACES if place.name == variant.place)
    feeders = [one for one in VARIANTS if (one.sends, one.place, one.path) == (Sends.NEW, home, variant.path)]
    return [] if any(one in variants for one in feeders) else [feeders[0].name]


def _beside_before(
    places: list[Place], variants: list[Variant], ratios: list[Ratio]
) -> tuple[list[Place], list[Variant], list[Ratio]]:
    ours = {place.name for place in places if place.peer is None and not place.app.startswith(("bare", "stock"))}
    doubled: list[Variant] = []
    for variant in variants:
        doubled.append(variant)
        if variant.place in ours:
            named = f"{variant.name}@before"
            doubled.append(
                replace(variant, name=named, title=f"{variant.title}, before", place=f"{variant.place}@before")
            )
            title = f"{variant.title}: now / before"
            ratios = [*ratios, Ratio(f"{variant.name}/before", title, variant.name, named, By.CPU)]
    added = [
        replace(
            place,
            name=f"{place.name}@before",
            shares=None if place.shares is None else f"{place.shares}@before",
            before=True,
        )
        for place in places
        if place.name in ours
    ]
    return [*places, *added], doubled, ratios


def without(chosen_: Chosen, missing: Iterable[str]) -> Chosen:
    """The selection without the places that could not be started."""
    gone = set(missing)
    places = tuple(place for place in chosen_.places if place.name not in gone)
    variants = tuple(variant for variant in chosen_.variants if variant.place not in gone)
    names = {variant.name for variant in variants}
    return Chosen(places, variants, tuple(one for one in chosen_.ratios if {one.ours, one.base} <= names))
