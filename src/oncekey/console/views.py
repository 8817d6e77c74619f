"""Renders pages from templates: what all pages need, how values are displayed, and static files."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from oncekey.console.dossier import body_of, indented, reason, token_of
from oncekey.core.model import HOUR, MINUTE, SECOND, Duration, Instant, Outcome, Record, State, lapse, moment
from oncekey.core.scope import NO_NAMESPACE, BindTo, bound_scope, shown_scope
from oncekey.ops.explain_retry import WHY, why

if TYPE_CHECKING:
    from starlette.requests import Request

    from oncekey.console.access import Session
    from oncekey.reconcile import Expected, LedgerEntry

LARGEST: Final = 2**63
_UNITS: Final = {"s": SECOND, "m": MINUTE, "h": HOUR, "d": 24 * HOUR}
_PLACES: Final = {
    **dict.fromkeys(("BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "VND", "VUV"), 0),
    **dict.fromkeys(("XAF", "XOF", "XPF"), 0),
    **dict.fromkeys(("BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"), 3),
}
"""Decimal places of the currencies that do not have two (ISO 4217)."""
_MEDIA_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
ASSETS: Final = (
    "console.css",
    "console.js",
    "charts.js",
    "icon.svg",
    "vendor/htmx.min.js",
    "vendor/htmx.LICENSE.txt",
    "vendor/uplot.min.js",
    "vendor/uplot.min.css",
    "vendor/uplot.LICENSE.txt",
)
HEADERS: Final[Mapping[str, str]] = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""The headers of every response."""

STATE_NAMES: Final[Mapping[State, str]] = {
    State.PENDING: "pending",
    State.IN_PROGRESS: "in progress",
    State.COMPLETED: "completed",
    State.FAILED_RETRYABLE: "retryable",
    State.UNKNOWN: "unknown",
    State.EXPIRED: "expired",
}


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of an operator who is logged in."""

    request: Request
    session: Session
    form: Mapping[str, str]

    @property
    def base(self) -> str:
        """The path under which the console is mounted."""
        return base_of(self.request)

    @property
    def by_htmx(self) -> bool:
        """Whether htmx requests only a part of a page."""
        return self.request.headers.get("hx-request") == "true"

    def asked(self, name: str) -> str:
        """A parameter of the address, without the blanks around it."""
        return readable(self.request.query_params.get(name, "")).strip()

    def form_field(self, name: str) -> str:
        """A field of the form."""
        return self.form.get(name, "")


def readable(text: str) -> str:
    """A text that every store accepts: without NUL, which no database can store."""
    return text.replace("\0", "")


def base_of(request: Request) -> str:
    """The path under which the console is mounted."""
    base: str = request.scope.get("root_path", "")
    return base.rstrip("/")


class FormError(Exception):
    """A field of a form has a value that is not allowed."""


def reason_of(form: Mapping[str, str]) -> str:
    """The reason of a form, which every change needs."""
    reason = form.get("reason", "").strip()
    if not any(letter.isalnum() for letter in reason):
        raise FormError("Enter a reason: it is stored in the audit.")
    return reason


def span_of(text: str) -> Duration | None:
    """The duration of `90s`, `15m`, `2h` or `3d`; 0 for an empty text, None for an invalid one."""
    if not text:
        return 0
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1] in _UNITS else (text, SECOND)
    return int(number) * unit if is_number(number) and len(number) < 7 else None  # noqa: PLR2004  (three thousand years)


def is_number(text: str) -> bool:
    """Whether it is a number that every store accepts."""
    return text.isascii() and text.isdigit() and int(text[:20]) < LARGEST and len(text) < 20  # noqa: PLR2004


def scope_of_tenant(tenant: str, namespace: str | None) -> str | None:
    """The scope of a caller as the pages show it, `acme` or `acme, principal ann`; a scope is used as it is."""
    if not tenant:
        return None
    if tenant.startswith("sha256:") or tenant.partition(":")[0].isdecimal():
        return tenant
    name, _, principal = tenant.partition(", principal ")
    bind_to = BindTo.PRINCIPAL if principal else BindTo.TENANT
    return bound_scope(bind_to, namespace or NO_NAMESPACE, name, principal=principal)


class Refused(HTTPException):
    """A request that the console refuses, with a page that gives the reason."""

    def __init__(self, status: int, heading: str, sentence: str) -> None:
        super().__init__(status, sentence)
        self.heading = heading


Handler: TypeAlias = Callable[[Visit], Awaitable[Response]]
"""Handles a request of an operator who is logged in."""


class Views:
    """The templates and the static files."""

    def __init__(self, title: str) -> None:
        self.as_typed: Callable[[str], str] = str
        """Replaces the names of commands in a page by those of the project."""
        self._assets = {name: files(__package__).joinpath("static", name).read_bytes() for name in ASSETS}
        self._assets["console.css"] = palette() + self._assets["console.css"]
        self._marks = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in self._assets.items()}
        self._environment = Environment(
            loader=PackageLoader(__package__, "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "when": when,
            "age": age,
            "whose": shown_scope,
            "token": lambda record: token_of(record.id),
            "token_of": token_of,
            "reason": reason,
            "shortly": shortly,
            "badge": badge,
            "why": why,
            "body": body_of,
            "indented": indented,
            "number": lambda count: f"{count.found:,}+" if count.more else f"{count.found:,}",
            "times": times,
            "amount": amount,
            "linked": linked,
            "latin": lambda raw: raw.decode("latin-1"),
        }
        self._environment.globals |= {
            "title": title,
            "State": State,
            "STATE_NAMES": STATE_NAMES,
            "WHY": WHY,
            "asset": lambda name: f"{name}?v={self._marks[name]}",
            "query": lambda **words: urlencode({name: word for name, word in words.items() if word}),
        }

    def page(self, base: str, template: str, status: int = 200, **context: Any) -> HTMLResponse:  # noqa: ANN401
        """A page from a template; every value in it is escaped."""
        text = self._environment.get_template(template).render(base=base, **context)
        return HTMLResponse(self.as_typed(text), status)

    def asset(self, name: str) -> Response | None:
        """A file that a page loads. Its address changes with its content, so it can be kept."""
        content = self._assets.get(name)
        if content is None:
            return None
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        kept = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(content, media_type=media_type, headers=kept)


def palette() -> bytes:
    """The colours as CSS variables, for the beginning of the style sheet that uses them."""
    return files(__package__).joinpath("static", "palette.css").read_bytes()


def when(instant: Instant | None) -> Markup:
    """An instant in UTC; the page's script shows it in the reader's zone, with UTC on hover."""
    if instant is None:
        return Markup("&ndash;")
    at = datetime.fromtimestamp(instant / SECOND, tz=UTC)
    utc = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(moment(instant), utc, utc)


def age(since: Instant | None, now: Instant) -> Markup:
    """How long ago an instant was, with the instant on hover."""
    if since is None:
        return Markup("&ndash;")
    at = datetime.fromtimestamp(since / SECOND, tz=UTC)
    return Markup('<time datetime="{}" title="{:%Y-%m-%d %H:%M:%S} UTC" data-age>{}</time>').format(
        moment(since), at, lapse(max(0, now - since))
    )


def times(count: int, one: str = "time", many: str = "times") -> str:
    """A number with its noun; one time is "once"."""
    return "once" if (count, one) == (1, "time") else f"{count:,} {one if count == 1 else many}"


def amount(one: LedgerEntry | Expected | None, *, minor_units: bool) -> str:
    """The amount of a charge with its currency, in major units."""
    if one is None or one.amount is None:
        return "\u2013"
    currency, value = one.currency or "", one.amount
    if minor_units:
        places = _PLACES.get(currency.upper(), 2)
        value = value.scaleb(-places).quantize(Decimal(1).scaleb(-places))
    return f"{value:,f} {currency}".rstrip()


def linked(sentence: str, links: Mapping[str, str]) -> Markup:
    """A sentence whose words link to an address."""
    text = escape(sentence)
    for words, address in links.items():
        text = text.replace(escape(words), Markup('<a href="{}">{}</a>').format(address, words))
    return text


def shortly(text: str, most: int = 22) -> str:
    """A long text, shortened to its two ends."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def badge(record: Record, now: Instant) -> Markup:
    """A state as a coloured word; a record whose lease is over is stuck."""
    kind, name = record.state.value, STATE_NAMES[record.state]
    if record.state is State.COMPLETED and record.outcome is Outcome.FAILURE:
        kind, name = "failure", "failed"
    if record.state is State.IN_PROGRESS and record.lease_until is not None and record.lease_until <= now:
        kind, name = "stuck", "stuck"
    return Markup('<span class="badge {}">{}</span>').format(kind, name)
