"""The settings of a kit: thresholds, names and places, each with its kind, its default and its description.

The thresholds for what waits are those of `oncekey doctor`, so that an alert and the doctor agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final

from oncekey.core.errors import ConfigurationError
from oncekey.core.model import SECOND, Duration
from oncekey.ops.doctor import Limits


class Part(StrEnum):
    """The parts of a kit, as `--only` names them."""

    ALERTS = "alerts"
    DASHBOARD = "dashboard"
    SYSTEMD = "systemd"
    KUBERNETES = "kubernetes"
    RUNBOOKS = "runbooks"


class ValueKind(Enum):
    """The form of a value, and the error if a value does not have it."""

    SPAN = (re.compile(r"[1-9]\d*[smhd]"), "a span of time: say 90s, 15m, 2h or 3d")
    COUNT = (re.compile(r"0|[1-9]\d{0,8}"), "a whole number: say 0, 20 or the like")
    PORT = (re.compile(r"[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]"), "a port: say 9000")
    SHARE = (re.compile(r"(\d{1,2}(\.\d+)?|100)%"), "a share: say 1% or 0.5%")
    LABELS = (re.compile(r"[a-z_]\w*(,[a-z_]\w*)*"), "the names of labels: say job, or namespace,job")
    WORD = (re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"), "a plain name: say it in small letters, digits and dashes")
    URL = (
        re.compile(r"https?://[^\s\"'\\\[\]{}<>]+[^\s\"'\\\[\]{}<>/]"),
        "a URL: say https://wiki.example.com/oncekey",
    )
    PATH = (re.compile(r"/[\w./+-]+"), "a whole path of plain letters: say /opt/shop/bin/oncekey")
    PLACE = (re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"), "a place in your code: say shop.main:once")
    IMAGE = (re.compile(r"[\w][\w./:@-]*"), "an image: say shop:1.0.0")

    def __init__(self, shape: re.Pattern[str], sentence: str) -> None:
        self.shape = shape
        self.sentence = sentence


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as `--set NAME=VALUE` sets it."""

    name: str
    default: str
    kind: ValueKind
    meaning: str
    parts: tuple[Part, ...] = (Part.ALERTS,)


def _worded(span: Duration) -> str:
    """A span as a text, in the largest unit that leaves no rest."""
    seconds = span // SECOND
    unit = next(unit for unit in _UNITS if seconds % _UNITS[unit] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"


_UNITS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LIMITS: Final = Limits()
_SHOWN: Final = (Part.ALERTS, Part.DASHBOARD)
_RUN: Final = (Part.SYSTEMD, Part.KUBERNETES)

SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        one.name: one
        for one in (
            Setting("by", "job", ValueKind.LABELS, "the labels that tell applications apart", _SHOWN),
            Setting(
                "runbooks",
                "https://runbooks.example.com/oncekey",
                ValueKind.URL,
                "where your people read the runbooks; each alert links there",
            ),
            Setting("page", "critical", ValueKind.WORD, "the severity of what wakes an operator up"),
            Setting("ticket", "warning", ValueKind.WORD, "the severity of what can wait for the morning"),
            Setting(
                "reservation-failures", "1%", ValueKind.SHARE, "requests that are refused because of the store", _SHOWN
            ),
            Setting("store-errors", "5", ValueKind.COUNT, "failures of the store within ten minutes"),
            Setting("unknown-age", _worded(_LIMITS.unknown), ValueKind.SPAN, "the oldest unknown outcome", _SHOWN),
            Setting("dead-letters", "0", ValueKind.COUNT, "dead letters that are no alert", _SHOWN),
            Setting(
                "outbox-lag", _worded(_LIMITS.due), ValueKind.SPAN, "the parcel that is overdue for longest", _SHOWN
            ),
            Setting("zombies", "5", ValueKind.COUNT, "keys without their owner within a quarter of an hour"),
            Setting("misuse", "20", ValueKind.COUNT, "misused keys of one tenant within a quarter of an hour"),
            Setting("misuse-all", "100", ValueKind.COUNT, "misused keys of all tenants within a quarter of an hour"),
            Setting(
                "duplicates", "200", ValueKind.COUNT, "repeated requests of one tenant within a quarter of an hour"
            ),
            Setting("duplicates-times", "4", ValueKind.COUNT, "and how many times as many as an hour before"),
            Setting(
                "workers", str(_LIMITS.workers), ValueKind.COUNT, "living workers at least; 0 where a timer does it"
            ),
            Setting("worker-gone", "5m", ValueKind.SPAN, "how long fewer may live"),
            Setting("stale-age", _worded(_LIMITS.stale), ValueKind.SPAN, "the key whose lease is over for longest"),
            Setting(
                "resumable-age", _worded(_LIMITS.resumable), ValueKind.SPAN, "the request not gone on with for longest"
            ),
            Setting("expired-age", _worded(_LIMITS.expired), ValueKind.SPAN, "the record that should long be reaped"),
            Setting("metrics-gone", "10m", ValueKind.SPAN, "how long no metrics may come at all"),
            Setting("app", "shop.main:once", ValueKind.PLACE, "where the application's Once object is", _RUN),
            Setting(
                "ledger",
                "https://ledger.example.com/charges.json",
                ValueKind.URL,
                "where the provider's charges can be read, for the nightly comparison",
                _RUN,
            ),
            Setting("ledger-since", "25h", ValueKind.SPAN, "how far back the nightly comparison goes", _RUN),
            Setting("health-port", "9000", ValueKind.PORT, "the worker's /healthz, /readyz and /metrics", _RUN),
            Setting("grace", "30", ValueKind.COUNT, "seconds that open calls have when a worker stops", _RUN),
            Setting("program", "/opt/shop/.venv/bin/oncekey", ValueKind.PATH, "the command", (Part.SYSTEMD,)),
            Setting("directory", "/opt/shop", ValueKind.PATH, "where the application's code lies", (Part.SYSTEMD,)),
            Setting("user", "shop", ValueKind.WORD, "who the worker runs as", (Part.SYSTEMD,)),
            Setting(
                "environment",
                "/etc/oncekey/environment",
                ValueKind.PATH,
                "a file with ONCEKEY_STORE=URL",
                (Part.SYSTEMD,),
            ),
            Setting("image", "shop:1.0.0", ValueKind.IMAGE, "an image with the application's code", (Part.KUBERNETES,)),
            Setting("secret", "oncekey", ValueKind.WORD, "the Secret that holds the store's URL", (Part.KUBERNETES,)),
            Setting("secret-key", "store-url", ValueKind.WORD, "by which name it does", (Part.KUBERNETES,)),
            Setting("replicas", "2", ValueKind.COUNT, "workers side by side", (Part.KUBERNETES,)),
        )
    }
)
"""All settings, by their names. `parts` are the parts of the kit that use a setting."""


def chosen(pairs: Iterable[str]) -> Mapping[str, str]:
    """The values of all settings: those of the `NAME=VALUE` pairs, and the defaults for the rest."""
    values = {name: setting.default for name, setting in SETTINGS.items()}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        setting = SETTINGS.get(name)
        if not equals or setting is None:
            raise ConfigurationError(f"--set {pair}: say NAME=VALUE; `oncekey kit --settings` lists the names")
        if setting.kind.shape.fullmatch(value) is None:
            raise ConfigurationError(f"--set {pair}: {name} is {setting.kind.sentence}")
        values[name] = value
    return MappingProxyType(values)


def filled(values: Mapping[str, str]) -> Mapping[str, str]:
    """The names that templates may use: the values, and what is computed from them."""
    spans = {name: values[name] for name in values if SETTINGS[name].kind is ValueKind.SPAN}
    labels = values["by"].split(",")
    return {
        **values,
        **{f"{name}.seconds": str(seconds(span)) for name, span in spans.items()},
        "by": ", ".join(labels),
        "whose": "/".join(f"{{{{ $labels.{label} }}}}" for label in labels),
        "reservation-failures.ratio": f"{float(values['reservation-failures'].rstrip('%')) / 100:g}",
        "stop-after": str(int(values["grace"]) + _MARGIN),
        "said": "".join(f" --set {name}={value}" for name, value in values.items() if value != SETTINGS[name].default),
    }


_MARGIN: Final = 15
"""Seconds between the end of a worker's grace and the moment when the system kills it."""


def seconds(span: str) -> int:
    """A span in seconds."""
    return int(span[:-1]) * _UNITS[span[-1]]
