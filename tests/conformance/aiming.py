"""How the shop and the demo are described to the tester."""

from __future__ import annotations

import json

from conformance.shop import Bug, Shop, Way
from oncekey_check import Address, CheckProfile, CheckReport, Failed, Target
from oncekey_check.carrier import IN_URL, Carrier, KeyFormat, Place

_TEAPOTS = {"product_id": "sku_teapot", "quantity": 2}
_KETTLE = {"product_id": "sku_kettle", "quantity": 1}

JSON = ("Content-Type", "application/json")

SHORT = 3.0
"""Seconds to wait for what never comes."""

# Shops in which somebody waits for what never comes, so that a run takes all the patience that it is given.
_NEVER_DONE = {Bug.LOCK_FOREVER, Bug.CONTENDED_FOREVER, Bug.HALF_BODY_CLAIMS, Way.NO_REPLAY}


def shop_target(shop: Shop, **more: object) -> Target:
    given = {
        "address": Address.parse(f"{shop.url}/orders"),
        "body": b'{"item": "teapot", "quantity": 2}',
        "headers": (JSON, ("Authorization", "Bearer alpha")),
        "other_tenant": (("Authorization", "Bearer beta"),),
        "same_caller": (("Authorization", "Bearer renewed"),),
        "slow": ("X-Slow", "0.4"),
        "fail": ("X-Fail", "1"),
        "count_address": Address.parse(f"{shop.url}/orders"),
        "count_pointer": "/total",
        "other_address": Address.parse(f"{shop.url}/refunds"),
        "unothers": True,
        "patience": SHORT if shop.bugs & _NEVER_DONE else 20.0,
    }
    return Target(**(given | _described(shop) | more))


def _described(shop: Shop) -> dict[str, object]:
    """What the owner of an unusual shop tells the tester."""
    if shop.has(Way.SHORT_ONLY):
        return {"key_format": KeyFormat.parse("ord_{{hex:16}}")}
    if shop.has(Way.UNIQUE):
        return {"body": b'{"item": "teapot", "quantity": 2, "reference": "ref-{{uuid}}"}'}
    if shop.has(Way.QUERY_KEY):
        return {"address": Address.parse(f"{shop.url}/orders?key={IN_URL}"), "carrier": Carrier(url=Place.QUERY)}
    if shop.has(Way.PATH_KEY):
        return {"address": Address.parse(f"{shop.url}/orders/{IN_URL}"), "carrier": Carrier(url=Place.PATH)}
    return {}


def demo_target(url: str) -> Target:
    return Target(
        address=Address.parse(f"{url}/orders"),
        body=json.dumps({"customer_id": "cus_1", "items": [_TEAPOTS, _KETTLE]}).encode(),
        headers=(JSON, ("Authorization", "Bearer demo-alpha")),
        other_tenant=(("Authorization", "Bearer demo-beta"),),
        slow=("X-Demo-Delay", "0.6"),
        count_address=Address.parse(f"{url}/orders?limit=10000"),
        unothers=True,
    )


def broken(report: CheckReport, *profiles: CheckProfile) -> set[str]:
    """Return the clauses that fail in one of the profiles, as promise or as advice."""
    return {
        finding.clause.id
        for finding in report.findings
        if isinstance(finding.verdict, Failed) and finding.verdict.only & set(profiles)
    }
