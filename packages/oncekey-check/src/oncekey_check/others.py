"""Clauses about requests on which a key has no effect, and about the API's own description."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Final

from oncekey_check.carrier import KEY
from oncekey_check.clauses import EVERY, Clause, Failed, Harm, InconclusiveError, Need, Passed, Severity, Verdict
from oncekey_check.judging import is_marked, shown
from oncekey_check.probe import Probe
from oncekey_check.raw_http import Address, RawRequest

_PLACEHOLDER: Final = re.compile(r"\\\{[^/]*\\\}")


def get_untouched(probe: Probe) -> Verdict:
    """GET with a used key behaves like GET without a key."""
    key = probe.fresh()
    first = probe.first(key)
    plain, keyed = _gets(probe, key, probe.target.address)
    without, with_key = probe.send_raw(plain), probe.send_raw(keyed)
    captured = with_key.ok and probe.same(first, with_key) and not probe.same(without, with_key)
    if is_marked(with_key) or captured:
        return Failed("GET with a used key is an ordinary GET", f"{shown(with_key)}, the stored response")
    if without.status != with_key.status:
        return Failed(f"GET with a key: {without.status}, as without", shown(with_key))
    return Passed()


def get_is_current(probe: Probe) -> Verdict:
    """GET with a key, before and after a change."""
    judged = False
    for address in dict.fromkeys(filter(None, (probe.target.address, probe.target.count_address))):
        plain, keyed = _gets(probe, probe.fresh(), address)
        old_with_key, old = probe.send_raw(keyed), probe.send_raw(plain)
        if not old_with_key.ok:
            continue
        probe.first(probe.fresh())
        # The plain request is first: if the page changes a moment later, the other one shows the change, too.
        now, with_key = probe.send_raw(plain), probe.send_raw(keyed)
        if is_marked(with_key):
            return Failed("GET with a key is an ordinary GET", f"{shown(with_key)}, the stored response")
        if probe.same(old, now):
            continue
        judged = True
        if with_key.body == old_with_key.body:
            return Failed("GET with a key returns the current state", f"{shown(with_key)}, the response from before")
    if not judged:
        raise InconclusiveError("no GET is known whose response an operation changes", Need.COUNT)
    return Passed()


def get_takes_no_key(probe: Probe) -> Verdict:
    """A key that was sent with GET can still be used."""
    key, before = probe.fresh(), probe.count()
    _, keyed = _gets(probe, key, probe.target.address)
    got = probe.send_raw(keyed)
    answer = probe.until_settled(probe.request(key))
    effects = probe.since(before)
    if not answer.ok:
        return Failed("after GET with its key, a request is executed", shown(answer))
    captured = effects == 0 if effects is not None else probe.same(got, answer)
    if is_marked(answer) or captured:
        probe.recount()
        return Failed("after GET with its key, a request is executed", f"{shown(answer)}, and it was not")
    return Passed()


def put_untouched(probe: Probe) -> Verdict:
    """PUT and DELETE do not require a key, and are not replayed."""
    for method in ("PUT", "DELETE"):
        key = probe.fresh()
        keyed = replace(probe.request(key), method=method)
        plain = replace(probe.request(None), method=method)
        # The first request may create or remove the resource; only the later ones can be compared.
        answers = [probe.send_raw(plain), probe.send_raw(plain), probe.send_raw(keyed), probe.send_raw(keyed)]
        if any(is_marked(answer) for answer in answers):
            return Failed(f"{method} with a key is an ordinary {method}", f"{shown(answers[-1])}")
        if answers[1].status != answers[2].status:
            headline = f"{method} received {answers[1].status} without a key, and {answers[2].status} with one"
            seen = " and ".join(map(shown, answers[1:3]))
            return Failed(f"{method} with and without a key: the same status", seen, headline=(Harm.WRONG, headline))
    return Passed()


def _gets(probe: Probe, key: str, address: Address) -> tuple[RawRequest, RawRequest]:
    """GET without and with a key."""
    plain, keyed = (replace(probe.request(one), method="GET", address=address, body=b"") for one in (None, key))
    return plain, keyed


def described(probe: Probe) -> Verdict:
    """OpenAPI names the header."""
    target = probe.target
    address = target.openapi or target.address.at("/openapi.json")
    answer = probe.send_raw(RawRequest("GET", address, (("Accept", "application/json"),)))
    try:
        document = json.loads(answer.body) if answer.ok else None
    except ValueError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("paths"), dict):
        raise InconclusiveError(f"there is no OpenAPI description at {address}", "--openapi")
    if target.carrier.name.lower() in json.dumps(_operation(document, target.address.path, target.method)).lower():
        return Passed()
    return Failed(f"the header {KEY} in the description of {target.method} {target.address.path}", "it is not named")


def _operation(document: dict[str, object], path: str, method: str) -> object:
    """The operation's own description, with the parameters and components that it may refer to."""
    paths = document["paths"]
    assert isinstance(paths, dict)
    for template, item in paths.items():
        pattern = _PLACEHOLDER.sub("[^/]+", re.escape(template))
        if re.search(rf"{pattern}$", path) and isinstance(item, dict) and isinstance(item.get(method.lower()), dict):
            operation = item[method.lower()]
            shared = document.get("components") if "$ref" in json.dumps(operation.get("parameters", [])) else None
            return [operation, item.get("parameters"), shared]
    raise InconclusiveError(f"the OpenAPI description has no {method} {path}", "--openapi")


CLAUSES: Final = (
    Clause(
        id="others.get",
        title="GET with a key is an ordinary GET",
        why="A client that sends its key with every request would read old responses.",
        fix="Ignore the key on GET.",
        severity=Severity.MEDIUM,
        requests=3,
        judge=get_untouched,
        sight=True,
    ),
    Clause(
        id="others.get-current",
        title="GET with a key returns the current state",
        why="A response to GET that is stored under a key hides every later change.",
        fix="Ignore the key on GET.",
        severity=Severity.HIGH,
        requests=5,
        judge=get_is_current,
        sight=True,
    ),
    Clause(
        id="others.get-takes-no-key",
        title="A key that was sent with GET is not used up",
        why="A client that reads first and orders later would receive the response of its read.",
        fix="Ignore the key on GET.",
        severity=Severity.HIGH,
        requests=4,
        judge=get_takes_no_key,
        sight=True,
    ),
    Clause(
        id="others.put-delete",
        title="PUT and DELETE do not need a key, and are not replayed",
        why="They are idempotent anyway; a stored response would hide the current state.",
        fix="Do not require or replay keys on PUT and DELETE.",
        severity=Severity.LOW,
        must=frozenset(),
        should=EVERY,
        needs=(Need.UNSAFE,),
        requests=8,
        judge=put_untouched,
    ),
    Clause(
        id="others.described",
        title=f"OpenAPI names {KEY}",
        why="Generated clients do not send a header that is not described.",
        fix="Describe the header as a parameter of the operation in OpenAPI.",
        severity=Severity.LOW,
        must=frozenset(),
        should=EVERY,
        requests=1,
        judge=described,
    ),
)
