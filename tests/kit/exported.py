"""What `oncekey.observe` really exports: the names of samples and their labels, asked of the registry itself."""

from __future__ import annotations

import re

from oncekey.observe.prometheus import Prometheus

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
_NAME = re.compile(r"\bapi_idempotency_\w+")
_MATCHED = re.compile(r"\b(api_idempotency_\w+)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def exported() -> dict[str, set[str]]:
    """Every sample's name, with the labels that it has; a scrape adds its own."""
    found: dict[str, set[str]] = {}
    for collector in Prometheus().registry._collector_to_names:
        for family in collector.describe():
            labels = {*getattr(family, "_labelnames", ()), *getattr(collector, "_labelnames", ())}
            for suffix in _SUFFIXES[family.type]:
                found[f"{family.name}{suffix}"] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


def names_in(text: str) -> set[str]:
    """Every name of ours in a query, or in prose."""
    return set(_NAME.findall(text))


def labels_in(text: str) -> set[tuple[str, str]]:
    """Every label that a query matches one of our samples by."""
    return {(name, label) for name, matchers in _MATCHED.findall(text) for label in _LABEL.findall(matchers)}
