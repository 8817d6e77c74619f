"""Flask: claims views, captures their responses, passes Flask's request to `tenant`, and lists routes.

`once.flask(app, tenant=...)` installs it in an application; `Once(database(db))` stores the keys in Flask-SQLAlchemy's
database, whose session then is the business transaction (`oncekey.databases.sqlalchemy.flask`).

A request is read before the application runs, because a parsed form cannot be read again. A protected view claims when
it is called, after `before_request` and the decorators above it. Its response is stored by the last function of
`after_this_request`: error handlers have run by then, functions that the view registered have changed the response,
every `after_request` comes later, and the session still exists; Flask removes it before the server gets the first byte.
So the changes of `after_request` apply to replays too.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

import flask

from oncekey.core.answers import marked_lines
from oncekey.core.errors import ConfigurationError, is_outage
from oncekey.core.model import Effects
from oncekey.engine.capture import Capture
from oncekey.engine.enrolment import SAFE, Enrolment
from oncekey.frameworks.asgi.protect import operation_parameter
from oncekey.frameworks.asgi.requests import layers
from oncekey.frameworks.blocking import BlockingExchange, Threads
from oncekey.frameworks.listing import Served, check_patterns
from oncekey.frameworks.shared import is_served, thread_exchange
from oncekey.frameworks.wsgi import Environ, OncekeyWsgi, responding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from oncekey.databases.sqlalchemy.flask import Database
    from oncekey.engine.run import Run

__all__ = ["database"]

ABOVE_THE_ROUTE: Final = (
    "{operation}: @once.protect is above @app.route, which has registered the function without protection: put "
    "@once.protect directly above the function"
)
_METHODS: Final = ("POST", "PUT", "PATCH", "DELETE")
ASYNC_PHASED: Final = "{operation} is PHASED and `async def`, but Flask cannot await its steps: make it a plain `def`"
OVERRIDDEN: Final = (
    "middleware inside oncekey's changed the method to {method} from {sent}, which takes no key: call once.flask(app) "
    "before that middleware wraps app.wsgi_app"
)
_PART: Final = re.compile(r"<(?:[^<>:]+:)?([^<>]+)>")
_OWN: Final = frozenset({"static", "idempotency_resource"})


def database(db: Any) -> Database:  # noqa: ANN401  (Flask-SQLAlchemy's, which need not be installed)
    """The database of a Flask-SQLAlchemy `db`, for `Once(database(db))`."""
    try:
        from oncekey.databases.sqlalchemy.flask import Database  # noqa: PLC0415  (an optional package)
    except ImportError as error:
        raise ConfigurationError("SQLAlchemy is not installed: pip install 'oncekey[flask,sqlalchemy]'") from error
    return Database(db)


def place(
    app: flask.Flask, threads: Threads, enrolled: Mapping[str, Callable[..., Any]], *, shows_request: bool
) -> None:
    """Protect an application in place, so that its test client is protected too."""
    middleware = _FlaskWsgi(app.wsgi_app, threads, serves_resources=False)
    middleware.prepare(app, enrolled, shows_request=shows_request)
    app.wsgi_app = middleware  # type: ignore[method-assign]  # as Flask's documentation has it
    ensure_sync = app.ensure_sync

    def as_it_is(view: Callable[..., Any]) -> Callable[..., Any]:
        # ASGI frameworks await a protected `def`; in Flask it returns its result and needs no event loop.
        enrolment: Enrolment | None = getattr(view, "__oncekey__", None)
        if enrolment is None:
            return ensure_sync(view)
        if enrolment.blocking:
            return view
        if getattr(view, "__oncekey_wrapper__", None) is not getattr(view, "__func__", view):
            return ensure_sync(view)  # a decorator above it, which has copied its attributes
        return functools.partial(_claimed, view, enrolment, ensure_sync)

    def idempotency_resource(**_: str) -> WSGIApplication:  # Flask accepts a WSGI application as a response
        exchange = thread_exchange.get()  # the exchange of this request
        assert exchange is not None
        answer = threads.resource(exchange.asked, flask.request.environ["PATH_INFO"])
        assert answer is not None
        return responding(answer)

    vars(app)["ensure_sync"] = as_it_is
    vars(app)["handle_exception"] = functools.partial(_unhandled, app, app.handle_exception)
    if threads.patterns.patterns:
        vars(app)["dispatch_request"] = functools.partial(_dispatched, app.dispatch_request)
    if threads.status_path is not None:
        app.add_url_rule(f"{threads.status_path}/<path:key>", view_func=idempotency_resource)
    if is_served(threads.policy):
        app.add_url_rule(threads.policy.docs_url, view_func=idempotency_resource)


def _unhandled(app: flask.Flask, handle: Callable[[Exception], Any], error: Exception) -> Any:  # noqa: ANN401
    """Return 503 if `db.session` lost its connection before the view, for example in `before_request`."""
    exchange = thread_exchange.get()
    answer = exchange.lost_before(error) if isinstance(exchange, _FlaskExchange) and is_outage(error) else None
    if answer is None:
        return handle(error)
    response = app.response_class(answer.body, status=answer.status)
    return app.finalize_request(_with_lines(response, answer.headers), from_error_handler=True)


def _dispatched(dispatch: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  (as Flask's)
    """Claim for a view that is enrolled by path; Flask has already matched the path to its route."""
    exchange, request = thread_exchange.get(), flask.request
    assert isinstance(exchange, _FlaskExchange)
    rule = None if request.routing_exception is not None else request.url_rule
    enrolment = None if rule is None else exchange.threads.patterns.find(request.method, _template(rule))
    if enrolment is None:
        return dispatch(*args)
    flask.after_this_request(exchange.settle)
    exchange.enter(enrolment)
    return dispatch(*args) if exchange.answer is None else flask.Response(status=exchange.answer.status)


def _claimed(
    view: Any,  # noqa: ANN401  (a protected function or method)
    enrolment: Enrolment,
    ensure_sync: Callable[..., Any],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Call an `async def` view: claim and store in the request's thread, and await only the view."""
    exchange, handler = thread_exchange.get(), view.__wrapped__
    assert exchange is not None
    name = operation_parameter(handler, blocking=False)
    bound = (view.__self__, *args) if hasattr(view, "__self__") else args
    return exchange.call(ensure_sync(handler), enrolment, name, bound, kwargs)


class _Request(Environ):
    """A request that passes Flask's own request to `tenant` and `principal`."""

    @property
    def shown(self) -> Any:  # noqa: ANN401
        return flask.request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001  (what the proxy is for)


class _FlaskExchange(BlockingExchange):
    """One request. Once its response is stored, WSGI has nothing left to capture or replace."""

    def call(
        self,
        handler: Callable[..., Any],
        enrolment: Enrolment,
        name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        if self.asked.method in SAFE and flask.request.method not in SAFE:
            raise ConfigurationError(OVERRIDDEN.format(sent=self.asked.method, method=flask.request.method))
        check_entry = getattr(getattr(self.threads.engines, "store", None), "check_entry", None)
        if check_entry is not None and self.asked.method not in SAFE:
            check_entry()
        flask.after_this_request(self._settle_last)
        return super().call(handler, enrolment, name, args, kwargs)

    def _run(self, invoke: Callable[[object], Any], run: Run) -> Any:  # noqa: ANN401
        stepping = getattr(self.threads.runtime.engine.driver, "stepping", None)
        if stepping is None or run.enrolment.effects is not Effects.PHASED:
            return super()._run(invoke, run)
        try:
            with stepping():
                return super()._run(invoke, run)
        except BaseException as error:
            self.ended.error = error
            raise

    def _settle_last(self, response: flask.Response) -> flask.Response:
        """Store the response after the functions that the view and its error handlers registered."""
        flask.after_this_request(self.settle)
        return response

    def settle(self, response: flask.Response) -> flask.Response:
        """Store the response and return it to Flask; a second call, after a failed `after_request`, does nothing."""
        capture, run = self.capture, self.run
        if capture is not None and run is not None:
            self._capture(response, capture)
            self.finish(None)
        answer, self.answer, self.capture = self.answer, None, None
        if answer is not None:
            instead = flask.current_app.response_class(answer.body, status=answer.status)
            return _with_lines(instead, answer.headers)
        if capture is None or run is None:
            return response
        kept = capture.kept
        response.response = capture.pieces() if kept is None else [kept]
        response.call_on_close(capture.close)
        lines = marked_lines(capture.headers, run.policy, echo=self.echo, expires_at=run.expires_at)
        return _with_lines(response, lines)

    def _capture(self, response: flask.Response, capture: Capture) -> None:
        """Read the whole body in Flask's own context; a body that fails part-way is a failure of the handler."""
        body = response.response
        response.direct_passthrough = False  # set by `send_file`
        lines = response.headers.to_wsgi_list()
        capture.start(response.status_code, [(name.encode("latin-1"), text.encode("latin-1")) for name, text in lines])
        try:
            for piece in response.iter_encoded():
                capture.body(piece, more=True)
                if capture.refused is not None:
                    break
        except Exception as error:
            self.ended.error = self.ended.error or error
            self.capture = Capture(capture._policy)  # noqa: SLF001  (for Flask's error response)
            raise
        finally:
            close = getattr(body, "close", None)
            if close is not None:
                close()


class _FlaskWsgi(OncekeyWsgi):
    exchange = _FlaskExchange

    def prepare(self, app: flask.Flask, enrolled: Mapping[str, Callable[..., Any]], *, shows_request: bool) -> None:
        """Attach the middleware to the application."""
        self._flask, self._enrolled = app, enrolled
        self._checked = False
        if shows_request:
            self.asked = _Request  # type: ignore[method-assign]  # it is made alike

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request, after a check on the first that views are protected correctly."""
        if not self._checked:
            self._check()
            self._checked = True
        return super().__call__(environ, start_response)

    def enrolled(self, _: str, __: str) -> None:
        """None: views are enrolled after Flask has routed the request."""

    def start(self) -> None:
        """Start as WSGI does, inside an application context: Flask-SQLAlchemy needs one for its engine."""
        with self._flask.app_context():
            super().start()

    def _check(self) -> None:
        check_patterns(list(_walk(self._flask)), self.threads.patterns)
        served = {id(layer) for view in self._flask.view_functions.values() for layer in _layers(view)}
        for operation, handler in self._enrolled.items():
            enrolment: Enrolment = handler.__oncekey__  # type: ignore[attr-defined]
            bare = getattr(handler, "__wrapped__", None)
            if id(bare) in served and id(handler) not in served:
                raise ConfigurationError(ABOVE_THE_ROUTE.format(operation=operation))
            if id(handler) in served and not enrolment.blocking and enrolment.effects is Effects.PHASED:
                raise ConfigurationError(ASYNC_PHASED.format(operation=operation))


def _layers(view: Any) -> Iterable[Any]:  # noqa: ANN401
    """A view, or the methods of its class, with the functions that their decorators wrap."""
    of_class = getattr(view, "view_class", None)
    handlers = [view] if of_class is None else [getattr(of_class, name.lower(), None) for name in _METHODS]
    return [layer for handler in handlers for layer in layers(handler)]


def _with_lines(response: flask.Response, lines: Iterable[tuple[bytes, bytes]]) -> flask.Response:
    response.headers.clear()
    for name, text in lines:
        response.headers.add(name.decode("latin-1"), text.decode("latin-1"))
    return response


def listed(app: Any) -> Iterator[Served] | None:  # noqa: ANN401  (an application of any kind)
    """Every route; None if it is not a Flask application."""
    return _walk(app) if hasattr(app, "url_map") and hasattr(app, "view_functions") else None


def _template(rule: Any) -> str:  # noqa: ANN401  (of werkzeug)
    """The path of a rule in OpenAPI's syntax."""
    return _PART.sub(r"{\1}", rule.rule)


def _walk(app: Any) -> Iterator[Served]:  # noqa: ANN401
    inner = app.wsgi_app
    patterns = (inner.threads.patterns,) if isinstance(inner, OncekeyWsgi) else ()
    for rule in app.url_map.iter_rules():
        view = app.view_functions.get(rule.endpoint)
        if view is None or rule.endpoint in _OWN:
            continue
        path, methods = _template(rule), frozenset(rule.methods or ())
        of_class = getattr(view, "view_class", None)
        if of_class is None:
            yield Served(path, methods, view, patterns, wsgi=True)
            continue
        for method in sorted(methods):
            handler = getattr(of_class, method.lower(), None) or getattr(of_class, "dispatch_request", None)
            if handler is not None:
                yield Served(path, frozenset({method}), handler, patterns, wsgi=True)
