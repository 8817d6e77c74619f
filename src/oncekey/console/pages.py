"""The pages that change nothing: overview, search, one record, unknown outcomes, audit and ledger."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit
from uuid import UUID

from starlette.responses import JSONResponse, RedirectResponse, Response

from oncekey.console.access import Role
from oncekey.console.dossier import TRIGGERS, Dossier, folded, gather, is_text, record_id_of, token_of
from oncekey.console.orders import DOCS, SLUGS, runbook_of
from oncekey.console.views import LARGEST, Handler, Refused, Visit, is_number, scope_of_tenant, span_of
from oncekey.core.model import Effects, RecordId, State
from oncekey.core.transitions import Actor, Mover
from oncekey.engine.operate import deletion_of, disclose, pulse, roll_of, survey_of
from oncekey.ops.explain_retry import downstream_keys
from oncekey.ops.stats import (
    ENDS,
    FINISHED,
    FIRST,
    FRESH,
    UNFINISHED,
    WINDOWS,
    Walk,
    headline,
    queues,
    sample_of,
    series,
)
from oncekey.reconcile import MEANING

if TYPE_CHECKING:
    from oncekey.console.app import Console
    from oncekey.core.flow import Flow
    from oncekey.core.model import Instant
    from oncekey.ops.stats import End, Stretch, WalkPosition
    from oncekey.ports.store import Store

PAGE: Final = 50
SHORTEST: Final = 4
"""A shorter text is searched as a whole key, not as a prefix."""
NO_RECORD: Final = (
    "No record has this key. It may have expired, or a LOCAL request is running on PostgreSQL, which writes its row "
    "when it commits."
)
NOT_FOUND: Final = (
    "It was deleted, or its key was used again after it expired, or it is not among the newest few thousand of its "
    "state. If you know the key, search for it."
)
NO_LEDGER: Final = "No ledger is configured"
_QUEUES: Final = {"unknown": "/unknown", "dead": "/letters"}


class Pages:
    """The pages that a reader may see."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ends: tuple[Instant, tuple[End, ...]] | None = None
        self.reads: tuple[tuple[str, Handler, Role], ...] = (
            ("/", self.overview, Role.READ),
            ("/live", self.live, Role.READ),
            ("/series.json", self.series, Role.READ),
            ("/records", self.records, Role.READ),
            ("/record/{token}", self.record, Role.READ),
            ("/unknown", self.unknown, Role.READ),
            ("/audit", self.audit, Role.READ),
            ("/incarnation/{id}", self.incarnation, Role.READ),
            ("/ledger", self.ledger, Role.READ),
        )
        self.writes: tuple[tuple[str, Handler, Role], ...] = (
            ("/find", self.find, Role.READ),
            ("/record/{token}", self.contents, Role.READ),
            ("/ledger", self.compare, Role.READ),
        )

    # Overview

    async def overview(self, visit: Visit) -> Response:
        """The waiting work, the workers, and the outcomes of recent requests."""
        window = visit.asked("window") or "1 h"
        return self._console.page(
            visit, "overview.html", windows=tuple(WINDOWS), window=window, **(await self._pulse(visit))
        )

    async def live(self, visit: Visit) -> Response:
        """The part of the overview that an open page requests again and again."""
        return self._console.page(visit, "_live.html", **(await self._pulse(visit)))

    async def _pulse(self, visit: Visit) -> dict[str, Any]:
        tally, roll = await self._console.ask(pulse)
        self._console.history.add(sample_of(tally, roll))
        level, sentence = headline(tally, roll)
        links = {words: f"{visit.base}{_QUEUES[what]}" for what, words in queues(tally)}
        return {"tally": tally, "roll": roll, "level": level, "sentence": sentence, "links": links}

    async def series(self, visit: Visit) -> Response:
        """The numbers of the charts."""
        window = WINDOWS.get(visit.asked("window"), WINDOWS["1 h"])
        tally, roll = await self._console.ask(pulse)
        history = self._console.history
        history.add(sample_of(tally, roll))
        if self._ends is None or not 0 <= tally.now - self._ends[0] < FRESH:
            self._ends = tally.now, await self._console.ask(lambda store: survey_of(store).ended(ENDS))
        return JSONResponse(series(self._ends[1], history.since(tally.now - window), tally.now, window))

    # Search

    async def records(self, visit: Visit) -> Response:
        """The records that match the filters, newest first."""
        wanted, wrong = self._wanted(visit)
        place = _place(visit.asked("before"))
        part = await self._console.ask(lambda store: survey_of(store).walk(wanted, PAGE, place))
        asked = {
            name: visit.asked(name) for name in ("state", "tenant", "operation", "effects", "error", "older", "younger")
        }
        further = ""
        if part.further:
            further = urlencode(
                {name: word for name, word in {**asked, "before": _token(part.further)}.items() if word}
            )
        template = "_rows.html" if visit.by_htmx else "records.html"
        return self._console.page(
            visit,
            template,
            part=part,
            further=further,
            asked=asked,
            wrong=wrong,
            beginning=place is None,
            key="",
            kinds=tuple(Effects),
            narrowed=any(word for name, word in asked.items() if name != "state"),
        )

    async def find(self, visit: Visit) -> Response:
        """Records by key or prefix, or by the downstream key or provider ID of a call."""
        key, tenant = visit.form_field("key").strip().strip('"'), visit.form_field("tenant").strip()
        if not key:
            return RedirectResponse(f"{visit.base}/records", 303)
        scope = self._scope(tenant)
        page = await self._console.ask(lambda store: survey_of(store).named(key, scope, PAGE))
        same = tuple(one for one in page.records if one.id.key == key)
        found: tuple[RecordId, ...] = tuple(one.id for one in same)
        if not found:
            found = await self._console.ask(lambda store: _called(store, key))
        if len(found) == 1:
            return RedirectResponse(f"{visit.base}/record/{token_of(found[0])}", 303)
        part: Stretch | None = None
        if len(key) >= SHORTEST and not same:
            wanted = Walk(states=(State.COMPLETED,), beginning=key, scope=scope)
            part = await self._console.ask(lambda store: survey_of(store).walk(wanted, PAGE))
        unfinished = page.records if len(key) >= SHORTEST else ()
        records = (same or unfinished) + (() if part is None else part.records)
        if len(records) == 1:
            return RedirectResponse(f"{visit.base}/record/{token_of(records[0].id)}", 303)
        return self._console.page(
            visit,
            "found.html",
            records=records,
            now=page.now,
            key=key,
            tenant=tenant,
            cut=part is not None and part.broken_off,
            short=len(key) < SHORTEST,
        )

    def _wanted(self, visit: Visit) -> tuple[Walk, str]:
        state, wrong = visit.asked("state"), ""
        older, younger = span_of(visit.asked("older")), span_of(visit.asked("younger"))
        if older is None or younger is None:
            wrong = "Enter an age as 90s, 15m, 2h or 3d."
        effects = visit.asked("effects")
        known: dict[str, tuple[State, ...]] = {"": UNFINISHED, "stuck": (State.IN_PROGRESS,)}
        known |= {one.value: (one,) for one in (*UNFINISHED, *FINISHED)}
        return Walk(
            states=known.get(state, UNFINISHED),
            scope=self._scope(visit.asked("tenant")),
            operation=visit.asked("operation") or None,
            effects=Effects(effects) if effects in set(Effects) else None,
            error=visit.asked("error") or None,
            older=older or 0,
            younger=younger or 0,
            stale=state == "stuck",
        ), wrong

    def _scope(self, tenant: str) -> str | None:
        return scope_of_tenant(tenant, self._console.namespace)

    # One record

    async def record(self, visit: Visit) -> Response:
        """One record, with its stored contents hidden; `contents` shows them."""
        return self._shown(visit, await self.dossier(visit), contents=False)

    async def contents(self, visit: Visit) -> Response:
        """One record with its stored contents; the audit records who viewed them."""
        dossier = await self.dossier(visit)
        mover = Mover(Actor.OPERATOR, visit.session.operator.name)
        why = visit.form_field("why").strip() or "viewed in the console"
        await self._console.ask(lambda store: disclose(store, dossier.record.id, mover, why))
        return self._shown(visit, await self.dossier(visit), contents=True)

    async def dossier(self, visit: Visit) -> Dossier:
        """The record that a URL names."""
        record_id = record_id_of(visit.request.path_params["token"])
        if record_id is None:
            raise Refused(404, "There is no such page", "The address may be outdated or incomplete.")
        dossier = await self._console.ask(lambda store: gather(store, record_id, None))
        if dossier is None:
            deleted = await self._console.ask(lambda store: deletion_of(store, record_id))
            why = NO_RECORD if deleted is None else f"There is no record of this key: {deleted}."
            raise Refused(404, "There is no such record", why)
        return dossier

    def _shown(self, visit: Visit, dossier: Dossier, *, contents: bool) -> Response:
        template, links = self._console.trace_url, {}
        if template is not None:
            links["Trace"] = template.replace("{trace}", dossier.record.incarnation.hex)
        if self._console.links is not None:
            links |= self._console.links(dossier.record)
        safe = {name: link for name, link in links.items() if urlsplit(link).scheme in {"http", "https"}}
        return self._console.page(
            visit,
            "record.html",
            dossier=dossier,
            record=dossier.record,
            now=dossier.now,
            contents=contents,
            links=safe,
            moved=visit.asked("moved"),
            slugs=SLUGS,
            runbook=runbook_of(None, dossier.record),
        )

    # Queues

    async def unknown(self, visit: Visit) -> Response:
        """The records whose outcome is unknown, oldest first."""
        place = (_place(visit.asked("after")) or {}).get(State.UNKNOWN, FIRST)
        part = await self._console.ask(lambda store: survey_of(store).unknown(PAGE, place))
        calls = (await self._console.ask(roll_of)).inline_calls
        references = {one.id: downstream_keys(one, calls(one.operation)) for one in part.records}
        further = urlencode({"after": _token(part.further)}) if part.further else ""
        return self._console.page(
            visit,
            "unknown.html",
            part=part,
            references=references,
            further=further,
            first=place == FIRST,
            runbook=f"{DOCS}/runbooks/unknown.md#oncekeyunknownold",
        )

    # Audit and ledger

    async def audit(self, visit: Visit) -> Response:
        """The audit, newest first: the lines of operators, or all lines."""
        before = int(text) if is_number(text := visit.asked("before")) else None
        everybody = visit.asked("who") == "all"
        actor = None if everybody else Actor.OPERATOR
        lines = await self._console.ask(lambda store: survey_of(store).notes(PAGE, before, actor))
        further = ""
        if lines.further is not None:
            further = urlencode({"before": lines.further, **({"who": "all"} if everybody else {})})
        tally, _ = await self._console.ask(pulse)
        return self._console.page(
            visit,
            "audit.html",
            lines=folded(lines.entries),
            everybody=everybody,
            further=further,
            now=tally.now,
            triggers=TRIGGERS,
        )

    async def incarnation(self, visit: Visit) -> Response:
        """Redirect from an audit line, which has no key, to its record."""
        try:
            incarnation = UUID(visit.request.path_params["id"])
        except ValueError:
            raise Refused(404, "There is no such page", "The address may be incomplete.") from None
        found = await self._console.ask(lambda store: _record_of(store, incarnation))
        if found is None:
            raise Refused(404, "The record was not found", NOT_FOUND)
        return RedirectResponse(f"{visit.base}/record/{token_of(found)}", 303)

    async def ledger(self, visit: Visit) -> Response:
        """The form that compares the provider's ledger with the store."""
        if self._console.ledger is None:
            raise Refused(404, NO_LEDGER, "The application passes one with Console(ledger=...).")
        return self._console.page(visit, "ledger.html", report=None, span="24h", meanings=MEANING, minor_units=False)

    async def compare(self, visit: Visit) -> Response:
        """Compare the provider's ledger with the store, for the last hours."""
        ledger = self._console.ledger
        if ledger is None:
            raise Refused(404, NO_LEDGER, "The application passes one with Console(ledger=...).")
        span = visit.form_field("span")
        since = span_of(span)
        if not since:
            raise Refused(400, "How far back?", "Enter it as 90s, 15m, 2h or 3d.")
        tally, _ = await self._console.ask(pulse)
        engine = await self._console.engine()
        report = await ledger.compared(engine, tally.now - since)
        return self._console.page(
            visit, "ledger.html", report=report, span=span, meanings=MEANING, minor_units=ledger.minor_units
        )


def _called(store: Store, name: str) -> Flow[tuple[RecordId, ...]]:
    """Records with a call that has this downstream key or provider ID."""
    if store.reconcile is None:
        return ()
    calls = yield from store.reconcile.calls_of(name, name)
    return tuple(dict.fromkeys(call.id for call in calls))


def _record_of(store: Store, incarnation: UUID) -> Flow[RecordId | None]:
    """The record of this incarnation, among the newest of each state."""
    for state in (*UNFINISHED, *FINISHED):
        part = yield from survey_of(store).walk(Walk(states=(state,), incarnation=incarnation), 1)
        if part.records:
            return part.records[0].id
    return None


def _token(places: Mapping[State, WalkPosition]) -> str:
    content = json.dumps({state.value: place for state, place in places.items()}).encode()
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _place(token: str) -> dict[State, WalkPosition] | None:
    """The place where the next page of a list begins; None, for the first page, if the token is invalid."""
    if not token:
        return None
    try:
        content: Any = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        places = {State(state): (int(at), scope, key) for state, (at, scope, key) in content.items()}
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None
    fit = all(abs(at) < LARGEST and is_text(scope) and is_text(key) for at, scope, key in places.values())
    return places if fit else None
