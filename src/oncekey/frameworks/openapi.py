"""OpenAPI: adds the header and responses of protected operations to an OpenAPI 3.0 or 3.1 document.

Each operation gets its key header, with the configured validity, every problem that it may return, by status, in the
flavour and format of its policy, and the headers of its responses. Existing content of the document stays, and so does
a response that is defined in another document.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from uuid import UUID

from oncekey.core.errors import ConfigurationError
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import Code, Effects
from oncekey.core.policy import InProgress, OnExpired, Policy
from oncekey.core.problems import PROBLEMS, render

if TYPE_CHECKING:
    from oncekey.engine.enrolment import Enrolment
    from oncekey.frameworks.listing import Served

EXAMPLE = "8e03978e-40d5-43e8-bc93-6894a57f9324"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ACCEPTED: Final = "Accepted: the request is committed, and a worker completes it."
PENDING: Final = {
    "type": "object",
    "properties": {"state": {"type": "string", "const": "pending"}, "status_url": {"type": "string"}},
    "required": ["state"],
}
"""The body of a 202 whose handler returns nothing."""
KNOWN: Final = re.compile(r"3\.[01]\.\d+(?:-.*)?")
NOT_KNOWN: Final = "this is an OpenAPI {version} document; 3.0 and 3.1 are supported: convert it first"
_ACCEPTED: Final = 202
_UNAVAILABLE: Final = 503
_NAMED: Final = re.compile(r"\{[^{}]*\}")


def document_of(app: Any) -> dict[str, Any] | None:  # noqa: ANN401  (an application of any kind)
    """The document that an application generates itself, as FastAPI and Litestar do; None if it does not."""
    made: dict[str, Any] | None = None
    if callable(getattr(app, "openapi", None)):
        made = app.openapi()
    elif getattr(app, "openapi_config", None) is not None:  # Litestar's, which may be left out
        made = app.openapi_schema.to_schema()
    return made


def transformed(document: Mapping[str, Any], routes: Iterable[Served]) -> tuple[dict[str, Any], list[str]]:
    """A copy of a document with the protected operations described, and the operations that it lacks."""
    version = str(document.get("openapi", document.get("swagger", "?")))
    if KNOWN.fullmatch(version) is None:
        raise ConfigurationError(NOT_KNOWN.format(version=version))
    made = copy.deepcopy(dict(document))
    return made, describe(made, routes)


def describe(document: dict[str, Any], routes: Iterable[Served]) -> list[str]:
    """Describe the protected operations in place, once; returns the operations that the document lacks."""
    missing = []
    paths: dict[str, Any] = document.get("paths") or {}
    by_shape = {_NAMED.sub("{}", path): path for path in paths}
    bases = [base for base in _bases(document) if base]
    for route in routes:
        for method in sorted(route.changing):
            enrolment = route.enrolment(method)
            if enrolment is None:
                continue
            about = _operation(paths, by_shape, bases, route.path, method)
            if about is None:
                missing.append(f"{method} {route.path}")
            else:
                describe_one(about, enrolment, document, wsgi=route.wsgi)
    return missing


def describe_one(
    about: dict[str, Any],
    enrolment: Enrolment,
    document: Mapping[str, Any] = MappingProxyType({}),
    *,
    wsgi: bool = False,
) -> None:
    """Describe one operation, once; `document` resolves its references."""
    if "x-oncekey" not in about:
        _describe(about, enrolment, document, wsgi=wsgi)


def _operation(
    paths: dict[str, Any], by_shape: Mapping[str, str], bases: list[str], path: str, method: str
) -> dict[str, Any] | None:
    """The operation of a route, regardless of the names of its parameters and of the servers' base path."""
    for candidate in (path, *(path.removeprefix(base) for base in bases if path.startswith(f"{base}/"))):
        found = candidate if candidate in paths else by_shape.get(_NAMED.sub("{}", candidate))
        about = None if found is None else paths[found].get(method.lower())
        if about is not None:
            return about if isinstance(about, dict) else None
    return None


def _bases(document: Mapping[str, Any]) -> Iterator[str]:
    for server in document.get("servers") or ():
        yield urlsplit(str(server.get("url", ""))).path.rstrip("/")


def _resolved(value: Any, document: Mapping[str, Any]) -> Any:  # noqa: ANN401  (any part of a document)
    """The target of a reference inside the document; other references are returned unchanged."""
    reference = value.get("$ref") if isinstance(value, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return value
    there: Any = document
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(there, dict) or name not in there:
            return value
        there = there[name]
    return there


def _own(response: Any, document: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """A copy of the response for this operation alone, because other operations may refer to the original."""
    made: dict[str, Any] = copy.deepcopy(_resolved(response, document))
    return made


def _is_key(parameter: Any, policy: Policy, document: Mapping[str, Any]) -> bool:  # noqa: ANN401
    found = _resolved(parameter, document)
    return found.get("in") == "header" and str(found.get("name", "")).lower() == policy.key_header.lower()


def _describe(about: dict[str, Any], enrolment: Enrolment, document: Mapping[str, Any], *, wsgi: bool) -> None:
    policy = enrolment.policy
    about["x-oncekey"] = {"effects": enrolment.effects.value, "operation": enrolment.operation}
    parameters = about.setdefault("parameters", [])
    if not any(_is_key(one, policy, document) for one in parameters):
        parameters.append(_parameter(policy))
    responses = about["responses"] = {
        str(status): _own(response, document) for status, response in about.get("responses", {}).items()
    }
    if enrolment.effects is Effects.OUTBOX:
        _add_accepted(responses.setdefault(str(_ACCEPTED), {"description": ACCEPTED}))
    ours: dict[str, list[str]] = {}
    """The titles of the problems under each status that the document did not have."""
    for code, problem in PROBLEMS.items():
        for status in statuses_of(code, policy, enrolment.effects, wsgi=wsgi):
            name = str(status)
            if name not in responses:
                ours[name] = []
            if name in ours:
                ours[name].append(problem.title)
            _add_problem(responses.setdefault(name, {}), code, status, policy)
    for name, titles in ours.items():
        responses[name]["description"] = "; or: ".join(titles)
    for status, response in responses.items():
        if status.startswith("2") and "$ref" not in response:
            headers = response.setdefault("headers", {})
            headers[policy.key_header] = _header("The key, as received.")
            headers[policy.expires_header] = _header("The time until which a retry receives this response.")
            headers[policy.replayed_header] = _header("`true` if this response was stored by an earlier request.")


def _add_accepted(response: dict[str, Any]) -> None:
    """Describe the 202 of an OUTBOX route: the handler's own body if it is described, otherwise the default one."""
    if "$ref" in response:
        return
    response.setdefault("content", {}).setdefault("application/json", {"schema": PENDING})
    response.setdefault("headers", {}).update(
        {
            "Retry-After": _header("Seconds to wait before retrying the request."),
            "Location": _header("The URL of the request's status."),
        }
    )


def _add_problem(response: dict[str, Any], code: Code, status: int, policy: Policy) -> None:
    """Add a problem to a response, which may also be the application's own: nothing is replaced."""
    if "$ref" in response:
        return
    page = render(code, status, policy, fault_id=UUID(EXAMPLE).hex, trace_id=TRACE)
    media = response.setdefault("content", {}).setdefault(page.media_type.decode(), {"schema": {"type": "object"}})
    if "$ref" not in media:
        if "example" in media:  # a media type has either one example or several
            media["examples"] = {"example": {"value": media.pop("example")}}
        media.setdefault("examples", {}).setdefault(
            code.value, {"summary": PROBLEMS[code].title, "value": json.loads(page.body)}
        )
    if PROBLEMS[code].waiting_helps:
        response.setdefault("headers", {})["Retry-After"] = _header("Seconds to wait before retrying the request.")
    if status == _ACCEPTED or code is Code.OUTCOME_UNKNOWN:
        response.setdefault("headers", {})["Location"] = _header("The URL of the request's status.")


def _parameter(policy: Policy) -> dict[str, Any]:
    quoted = policy.header_syntax is HeaderSyntax.STRICT
    schema: dict[str, Any] = {"type": "string"}
    if quoted:
        schema["minLength"] = policy.shortest_key + 2
    else:
        schema |= {"minLength": policy.shortest_key, "maxLength": policy.max_key_length}
    if policy.key_format is KeyFormat.UUID and not quoted:
        schema["format"] = "uuid"
    hours = policy.ttl.total_seconds() / 3600
    return {
        "name": policy.key_header,
        "in": "header",
        "required": policy.require_key,
        "description": (
            "Makes the request safe to retry: send the same key with the same request, and it is executed once; every "
            f"retry within {hours:g} hours receives the original response. Use a new random UUID for each new request."
        ),
        "schema": schema,
        "example": f'"{EXAMPLE}"' if quoted else EXAMPLE,
    }


def _header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}


def statuses_of(code: Code, policy: Policy, effects: Effects, *, wsgi: bool = False) -> tuple[int, ...]:
    """The statuses of this problem on a route; none if it cannot occur there."""
    status = PROBLEMS[code].status_in(policy.flavor)
    occurs = True
    match code:
        case Code.KEY_MISSING:
            occurs = policy.require_key
        case Code.KEY_NOT_FOUND:
            occurs = False  # only the status resource returns it
        case Code.BODY_LENGTH_MISSING:
            occurs = wsgi
        case Code.BODY_TOO_SLOW:
            occurs = not wsgi  # a WSGI server reads the body, and has its own time limit
        case Code.KEY_EXPIRED:
            occurs = policy.on_expired is OnExpired.GONE
        case Code.RATE_LIMITED:
            occurs = (policy.max_new_keys_per_second or policy.max_live_keys) is not None
        case Code.REQUEST_TOO_OLD:
            occurs = policy.max_request_age is not None
        case Code.IN_PROGRESS if policy.on_in_progress is InProgress.ACCEPTED:
            status = _ACCEPTED
        case Code.OUTCOME_UNKNOWN:
            # 503: the outcome could not be written, whatever the setting.
            return (policy.on_unknown,) if policy.on_unknown == _UNAVAILABLE else (policy.on_unknown, _UNAVAILABLE)
        case Code.TIMED_OUT:
            occurs, status = effects is Effects.OUTBOX, policy.abandoned_status
        case _:
            pass
    return (status,) if occurs else ()
