"""The options of a run as a shell takes them: a report shows them, with variables in the place of credentials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from oncekey.conformance.carrier import KEY, MARKER
from oncekey.conformance.clauses import Profile
from oncekey.conformance.curl import printable
from oncekey.conformance.shell import Secrets, octets, quoted, variable
from oncekey.conformance.shots import Header
from oncekey.conformance.target import Target

_COMMANDS: Final = ("crash_command", "store_down_command", "store_up_command")


def invocation(target: Target, profile: Profile) -> str:
    """The command that makes the same run again."""
    words = [word for option, value in options(target, profile) for word in (option, value) if word]
    return " ".join(["oncekey", "check", quoted(str(target.address)), *words])


def options(target: Target, profile: Profile) -> list[tuple[str, str]]:
    """Every option that is not at its default, with its value as a word of a shell."""
    usual = Target(address=target.address, body=target.body)
    return [
        ("--profile", profile.value),
        ("--body", _body(target.body)),
        *([("--method", quoted(target.method))] if target.method != usual.method else []),
        *_headers(target),
        *_bodies(target),
        *_addresses(target),
        *_carrier(target),
        *((_option(name), quoted(variable(name.upper()))) for name in _COMMANDS if getattr(target, name)),
        *(
            (_option(name), f"{getattr(target, name):g}")
            for name in ("lease", "patience", "timeout", "command_limit")
            if getattr(target, name) != getattr(usual, name)
        ),
        *([("--unsafe-methods", "")] if target.unsafe_methods else []),
        *([("--key-optional", "")] if target.key_optional else []),
    ]


def _headers(target: Target) -> Iterator[tuple[str, str]]:
    secrets = Secrets(target)

    def word(line: Header) -> str:
        return quoted(octets(secrets.line(line)))

    yield from (("--header", word(line)) for line in target.headers)
    yield from (("--other-tenant-header", word(line)) for line in target.other_tenant)
    for option, line in (("--slow", target.slow), ("--fail", target.fail), ("--large", target.large)):
        if line is not None:
            yield f"{option}-header", word(line)


def _bodies(target: Target) -> Iterator[tuple[str, str]]:
    for option in ("other_body", "invalid_body", "declined_body"):
        body = getattr(target, option)
        if body is not None:
            yield _option(option), _body(body)


def _addresses(target: Target) -> Iterator[tuple[str, str]]:
    given = {
        "--count-url": target.count_address,
        "--other-url": target.other_address,
        "--also-url": target.also_address,
        "--openapi": target.openapi,
    }
    yield from ((option, quoted(str(address))) for option, address in given.items() if address is not None)
    if target.count_pointer:
        yield "--count-pointer", quoted(target.count_pointer)
    if target.address.cacert is not None:
        yield "--cacert", quoted(target.address.cacert)


def _carrier(target: Target) -> Iterator[tuple[str, str]]:
    carrier = target.carrier
    if carrier.member is not None:
        yield "--key-field", quoted(carrier.member)
    if carrier.header != KEY:
        yield "--key-header", quoted(carrier.header)
    if (carrier.marker, carrier.marked_by) != (MARKER, "true"):
        yield "--marker-header", quoted(f"{carrier.marker}: {carrier.marked_by}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _body(body: bytes) -> str:
    return quoted(printable(body)) if printable(body) else f"@FILE  # of {len(body)} bytes"
