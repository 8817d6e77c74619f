"""`oncekey dlq list|show|retry|discard`: the dead letters of the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from oncekey.cli import applications, options, printing
from oncekey.core.enclosing import shown_text
from oncekey.core.flow import Flow, adrive
from oncekey.core.model import DeadLetter, ParcelKind, RecordId, Snapshot, moment
from oncekey.core.operate import Forbidden, Moved, OperatorCommand, Order, ParcelLocation, possible
from oncekey.engine import operate
from oncekey.engine.operate import LetterMoved
from oncekey.ops.explain_retry import purpose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oncekey.engine.shell import AsyncEngine

LetterId = Annotated[UUID, typer.Argument(help="The id of the dead letter, from `dlq list`.", metavar="ID")]


def register(app: typer.Typer) -> None:
    """Add the group `dlq`."""
    group = typer.Typer(
        help="Dead letters: calls and messages that failed too often, or whose call may have been made and must "
        "not be repeated. A `defer` is a request's own call, an `emit` a message to other "
        f"systems.\n\n{options.CODES}",
        no_args_is_help=True,
    )
    for name, command in (("list", list_letters), ("show", show), ("retry", retry), ("discard", discard)):
        group.command(name)(command)
    app.add_typer(group, name="dlq")


def list_letters(store: options.StoreUrl, *, limit: options.Limit = 100, as_json: options.AsJson = False) -> None:
    """List the dead letters, oldest first. Changes nothing.

    JSON: {"now", "items": [{"id", "kind", "topic", "key", "scope", "downstream_key", "attempts", "created_at",
    "died_at", "first_error", "last_error"}], "next"}. "attempts" counts since the last retry.
    """

    async def looking(engine: AsyncEngine) -> tuple[DeadLetter, ...]:
        return await adrive(operate.box_of(engine.store).dead_letters(limit), engine.driver.run)

    letters = options.work(store, looking)
    if as_json:
        printing.as_list([line_of(letter) for letter in letters])
        return
    head = ("id", "kind", "topic", "key", "attempts", "died_at", "last_error")
    rows = [[line[name] for name in head] for line in map(line_of, letters)]
    first = ("id", "kind", "topic", "last_error", "died_at", "attempts")
    printing.table(head, rows, empty="there are no dead letters", first=first)
    if rows:
        typer.echo("Details and commands: oncekey dlq show ID", err=True)


def show(letter_id: LetterId, store: options.StoreUrl, *, as_json: options.AsJson = False) -> None:
    """Show a dead letter with its payload and errors. Changes nothing. Exit code 1 if there is none.

    JSON: the fields of `dlq list`, and "payload" (as it was written), "incarnation", "order_by".
    """

    async def looking(engine: AsyncEngine) -> tuple[DeadLetter, Snapshot, tuple[ParcelLocation, ...]] | None:
        letter = await adrive(operate.box_of(engine.store).find_dead_letter(letter_id), engine.driver.run)
        if letter is None:
            return None
        parcels = operate.operations_of(engine.store).parcels(letter.parcel.incarnation)
        return letter, await engine.find(letter.parcel.record_id), await adrive(parcels, engine.driver.run)

    found = options.work(store, looking)
    if found is None:
        options.refuse(Forbidden(operate.NO_LETTER), json_wanted=as_json, read=True)
    if as_json:
        printing.as_json(_shape(found[0]))
    else:
        printing.lines(letter_lines(*found))


def letter_lines(letter: DeadLetter, seen: Snapshot, parcels: tuple[ParcelLocation, ...]) -> Iterator[str]:
    """The lines of `dlq show`: a dead letter, and the commands that are possible now."""
    parcel, record = letter.parcel, seen.record
    yield from printing.pairs(
        [(name.replace("_", " "), value) for name, value in _shape(letter).items() if value is not None]
    )
    yield ""
    if parcel.kind is ParcelKind.EMIT:
        yield "Retry or discard it:"
        yield from (f"  oncekey dlq {verb} {parcel.id} --reason '...'" for verb in ("retry", "discard"))
    elif record is None or operate.is_settled(record, letter):
        yield "Its request was deleted, or settled without it, so nothing needs the call:"
        yield f"  oncekey dlq discard {parcel.id} --reason '...'"
    else:
        for one in possible(record, seen.now, parcels):
            yield f"{purpose(one.order, record)}:"
            command = options.possibility(one, parcel.record_id)["command"]
            yield from (f"  {line}" for line in printing.broken(command, indent=6))
            if one.note:
                yield f"  {one.note}"
        yield "Its request:"
        yield f"  oncekey keys show {options.typed(parcel.record_id)}"


def retry(
    letter_id: LetterId,
    store: options.StoreUrl,
    *,
    reason: options.Reason,
    by: options.By = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Retry a dead letter, counting attempts from 1 again.

    An `emit` goes back to the outbox; receivers recognise a repeated delivery by its downstream key.

    A `defer` goes back together with its record: unknown becomes pending, and a worker makes the call. That is allowed
    only while repeating the call is safe: within the window that its topic declares, or if its result is already
    stored. After that the provider could execute it twice: check with the provider, and record the outcome with
    `oncekey keys resolve`; its --not-executed returns the call to the outbox. Until the call ends, a client that
    retries receives 202 (accepted).

    JSON: {"changed": true, "row", "from", "to", "retry", "record"} for a `defer`, {"changed": true, "letter"} for an
    `emit`, or {"changed": false, "why", "possible"}. "row" is the number of the move in docs/explanation/states.md.
    """
    command = OperatorCommand(Order.RETRY, options.required_reason(reason))
    mover = options.operator(by)
    _settle(
        store,
        letter_id,
        lambda engine: operate.retry(engine.store, letter_id, command, mover, notify=applications.notify()),
        verbose,
        json_wanted=as_json,
    )


def discard(
    letter_id: LetterId,
    store: options.StoreUrl,
    *,
    reason: options.Reason,
    status: options.Status = None,
    body: options.Body = None,
    content_type: options.ContentType = "application/json",
    header: options.Header = None,
    by: options.By = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Discard a dead letter: it is never delivered.

    An `emit`, and a `defer` whose request is gone or settled, is deleted.

    A `defer` whose request is still open is discarded with a response: its record is completed as a failure, and
    retries of the client receive that response. Pass --status and --body to choose it. Discard it only if the call was
    not made, or was undone at the provider; if it was made, use `oncekey keys resolve --executed` instead. If it was
    not made and still should be, use `oncekey keys resolve --not-executed`: a worker makes it.

    JSON: {"changed": true, "row", "from", "to", "retry", "record"} or {"changed": true, "letter"}, or {"changed":
    false, "why", "possible"}. "row" is the number of the move in docs/explanation/states.md.
    """
    answer = options.answer_of(status, body, content_type, header, final_no=True) or operate.given_up()
    command = OperatorCommand(Order.DISCARD, options.required_reason(reason), answer=answer)
    mover = options.operator(by)
    _settle(
        store,
        letter_id,
        lambda engine: operate.discard(engine.store, letter_id, command, mover, notify=applications.notify()),
        verbose,
        json_wanted=as_json,
    )


def _settle(
    store: str,
    letter_id: UUID,
    flow: Callable[[AsyncEngine], Flow[Moved | LetterMoved | Forbidden]],
    verbose: bool,
    *,
    json_wanted: bool,
) -> None:
    about: list[RecordId] = []

    async def doing(engine: AsyncEngine) -> Moved | LetterMoved | Forbidden:
        letter = await adrive(operate.box_of(engine.store).find_dead_letter(letter_id), engine.driver.run)
        about.extend(() if letter is None else (letter.parcel.record_id,))
        return await adrive(flow(engine), engine.driver.run)

    done = options.work(store, doing)
    match done:
        case Forbidden():
            moves = about and done.why != operate.ORPHAN  # its message names the command that is possible
            options.refuse(done, json_wanted=json_wanted, about=about[0] if moves else None, verbose=verbose)
        case LetterMoved(letter, trigger):
            if json_wanted:
                printing.as_json({"changed": True, "letter": {**line_of(letter), "trigger": trigger.value}})
                return
            again = letter.parcel.kind is ParcelKind.EMIT and trigger.value == "dlq_retry"
            typer.echo(f"{letter.parcel.id} {'is due again' if again else 'is deleted'} (audited)")
        case _:
            options.print_move(done, json_wanted=json_wanted, verbose=verbose)


def _shape(letter: DeadLetter) -> dict[str, Any]:
    parcel = letter.parcel
    return {
        **line_of(letter),
        "payload": shown_text(parcel.payload),
        "incarnation": str(parcel.incarnation),
        "order_by": parcel.order_by,
    }


def line_of(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter as an item of `dlq list`."""
    parcel = letter.parcel
    return {
        "id": str(parcel.id),
        "kind": parcel.kind.value,
        "topic": parcel.topic,
        "key": parcel.record_id.key,
        "scope": parcel.record_id.scope,
        "downstream_key": parcel.downstream_key,
        "attempts": letter.attempts,
        "created_at": moment(letter.created_at),
        "died_at": moment(letter.died_at),
        "first_error": letter.first_error,
        "last_error": letter.last_error,
    }
