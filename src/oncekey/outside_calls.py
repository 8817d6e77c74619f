"""Calls to the outside that a handler makes, as far as its source shows them.

A protected handler says beforehand which calls it makes: `op.call` in a PHASED one, `op.defer` in an OUTBOX one. A call
that it makes beside that is not stored, has no key of its own, and is made again when the handler runs again. This
reads the handler's source, and that of the functions of its own module that it mentions, for calls through packages
that talk to others.

It does not see functions of other modules, methods of the application's own objects, objects whose kind nothing says
(no import, no global, no annotation), or anything that is decided when the program runs. So nothing found is no proof.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

HTTP: Final = ("httpx", "requests", "aiohttp", "urllib3", "urllib.request", "http.client")
"""Packages of HTTP: what their verbs send may change something."""
OTHERS: Final = (
    "stripe",
    "boto3",
    "botocore",
    "aiobotocore",
    "braintree",
    "paypalrestsdk",
    "Adyen",
    "square",
    "twilio",
    "sendgrid",
    "smtplib",
    "slack_sdk",
)
"""Packages of providers: what does not only read may change something."""

_SENDS: Final = frozenset({"post", "put", "patch", "delete", "request", "send", "stream", "urlopen"})
_READS: Final = frozenset(
    {
        *("get", "retrieve", "list", "search", "describe", "json", "keys", "values", "items", "to_dict"),
        *("client", "resource", "connect", "login", "starttls", "close", "aclose", "quit"),
    }
)
_READING: Final = ("get_", "list_", "describe_", "head_", "search_", "retrieve_")
_DEEPEST: Final = 12


@dataclass(frozen=True, slots=True)
class OutsideCall:
    """A call as it is written, where, and whether the handler has announced it."""

    what: str
    file: str
    line: int
    announced: bool


def outside_calls(handler: Callable[..., Any]) -> list[OutsideCall]:
    """All that are seen, in the order of the source."""
    function = inspect.unwrap(handler)
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return []
    reading = _Reading()
    reading.function(function, announced=False)
    return sorted(set(reading.found), key=lambda one: (one.file, one.line, one.what))


@dataclass(slots=True)
class _Scope:
    """What the names of one function stand for."""

    names: Mapping[str, Any]
    module: str
    file: str
    local: dict[str, str] = field(default_factory=dict)
    """Names of packages' things that the function has made itself."""
    inner: dict[str, ast.AST] = field(default_factory=dict)
    """Functions inside of it."""


@dataclass(slots=True)
class _Reading:
    found: list[OutsideCall] = field(default_factory=list)
    _met: set[tuple[object, bool]] = field(default_factory=set)
    _depth: int = 0

    def function(self, function: types.FunctionType, *, announced: bool) -> None:
        """Read a function of the module, once for each way that it is called in."""
        place = (function.__code__, announced)
        node = _source_of(function.__code__)
        if place in self._met or node is None or self._depth >= _DEEPEST:
            return
        self._met.add(place)
        self._depth += 1
        names = dict(function.__globals__)
        with_cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        names.update({name: cell.cell_contents for name, cell in with_cells if _is_filled(cell)})
        self._body(node, _Scope(names, function.__module__, Path(function.__code__.co_filename).name), announced)
        self._depth -= 1

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: _Scope, announced: bool) -> None:  # noqa: FBT001
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            kind = None if argument.annotation is None else _package(argument.annotation, scope)
            if kind is not None:
                scope.local[argument.arg] = kind
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            self._visit(statement, scope, announced)

    def _visit(self, node: ast.AST, scope: _Scope, announced: bool) -> None:  # noqa: FBT001
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.inner[node.name] = node  # read where it is mentioned
                return
            case ast.Import() | ast.ImportFrom():
                scope.local.update(_imported(node))
                return
            case ast.Assign(targets=[ast.Name(name)], value=value):
                _bind(name, value, scope)
            case ast.withitem(context_expr=value, optional_vars=ast.Name(name)):
                _bind(name, value, scope)
            case ast.Name(id=name, ctx=ast.Load()):
                self._mention(name, scope, announced)
            case ast.Call(func=ast.Attribute(attr="call"), args=[_, made, *_]):
                self._children(node, scope, announced, made)
                self._visit(made, scope, announced=True)
                return
            case ast.Call(func=ast.Attribute(attr="call"), keywords=[*given]) if _function_in(given) is not None:
                function = _function_in(given)
                assert function is not None
                self._children(node, scope, announced, function)
                self._visit(function, scope, announced=True)
                return
            case ast.Call():
                self._call(node, scope, announced)
        self._children(node, scope, announced)

    def _children(self, node: ast.AST, scope: _Scope, announced: bool, but: ast.AST | None = None) -> None:  # noqa: FBT001
        for child in ast.iter_child_nodes(node):
            if child is but or (isinstance(child, ast.keyword) and child.value is but):
                continue
            self._visit(child, scope, announced)

    def _mention(self, name: str, scope: _Scope, announced: bool) -> None:  # noqa: FBT001
        inner = scope.inner.get(name)
        if inner is not None:
            if (inner, announced) not in self._met:
                self._met.add((inner, announced))
                self._body(inner, scope, announced)  # type: ignore[arg-type]  # only functions are put there
            return
        there = scope.names.get(name)
        if isinstance(there, types.FunctionType) and there.__module__ == scope.module and name not in scope.local:
            self.function(there, announced=announced)

    def _call(self, node: ast.Call, scope: _Scope, announced: bool) -> None:  # noqa: FBT001
        package = _package(node.func, scope)
        last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if package is not None and _changes(package, last):
            self.found.append(OutsideCall(_text(node.func), scope.file, node.lineno, announced))


def _function_in(given: list[ast.keyword]) -> ast.expr | None:
    """The function of `op.call(name, fn=...)`."""
    return next((one.value for one in given if one.arg == "fn"), None)


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"…{text[-60:]}"  # noqa: PLR2004  (it is shown in a line)


def _changes(package: str, last: str) -> bool:
    if package in HTTP:
        return last in _SENDS
    return bool(last) and not last[0].isupper() and last not in _READS and not last.startswith(_READING)


def _bind(name: str, value: ast.expr, scope: _Scope) -> None:
    kind = _package(value, scope)
    if kind is None:
        scope.local.pop(name, None)
    else:
        scope.local[name] = kind


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        whole = alias.name if isinstance(node, ast.Import) else f"{node.module or ''}.{alias.name}"
        package = _known(whole)
        if package is not None:
            yield (
                alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name),
                package,
            )


def _package(node: ast.AST, scope: _Scope) -> str | None:
    """Which of the packages a value comes from, if it is seen."""
    match node:
        case ast.Name(id=name) if name in scope.local:
            return scope.local[name]
        case ast.Name(id=name):
            return _of(scope.names.get(name))
        case ast.Attribute(value=inner, attr=attribute):
            there = _object(inner, scope)
            found = None if there is None else _of(inspect.getattr_static(there, attribute, None))
            return found or _package(inner, scope)
        case ast.Call(func=inner) | ast.Await(value=inner):
            return _package(inner, scope)
        case ast.Subscript(value=inner, slice=ast.Tuple(elts=[first, *_]) | first):  # Annotated[Client, Depends(...)]
            return _package(inner, scope) or _package(first, scope)
        case ast.BinOp(left=left, right=right):  # Client | None
            return _package(left, scope) or _package(right, scope)
        case ast.Constant(value=str(text)):
            return _quoted(text, scope)
        case _:
            return None


def _quoted(text: str, scope: _Scope) -> str | None:
    try:
        return _package(ast.parse(text, mode="eval").body, scope)
    except SyntaxError:
        return None


def _object(node: ast.AST, scope: _Scope) -> Any:  # noqa: ANN401  (anything that a module may hold)
    """The module or object behind a dotted name, without running anything of it."""
    match node:
        case ast.Name(id=name) if name not in scope.local:
            return scope.names.get(name)
        case ast.Attribute(value=inner, attr=attribute):
            there = _object(inner, scope)
            return None if there is None else inspect.getattr_static(there, attribute, None)
        case _:
            return None


def _of(there: object) -> str | None:
    if there is None:
        return None
    if isinstance(there, types.ModuleType):
        return _known(there.__name__)
    return _known(there.__module__ if isinstance(there, type | types.FunctionType) else type(there).__module__)


def _known(module: str) -> str | None:
    return next((one for one in (*HTTP, *OTHERS) if module == one or module.startswith(f"{one}.")), None)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _source_of(code: types.CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The definition of a function, by its file and the line where it or its first decorator begins."""
    return _definitions(code.co_filename).get((code.co_name, code.co_firstlineno))


@cache
def _definitions(file: str) -> dict[tuple[str, int], ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        tree = ast.parse(Path(file).read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    found: dict[tuple[str, int], ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[node.name, line] = node
    return found
