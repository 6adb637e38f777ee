"""Assert expressions, split in two: calls of the tested program, and what is said of their values.

``abs(f(1) - 0.5) < 1e-6`` is the call ``f(1)``, and ``abs(ARGUMENTS[0] - 0.5) < 1e-6``. The call runs in the
program's process, which gives a plain value; the rest runs where the program never was. So an object that
claims to equal everything, or a builtin that was replaced, decides nothing.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_BUILTINS = frozenset(dir(builtins))

_STARRED = frozenset(
    (
        *("bisect", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
        *("math", "operator", "random", "re", "string", "typing"),
    )
)


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


@dataclass(frozen=True)
class Split:
    """The two parts of an assert's expression."""

    calls: tuple[str, ...]
    """Expressions of the tested program."""
    judgement: str
    """Expression of their values ARGUMENTS[0], ARGUMENTS[1], ..."""
    helpers: str = ""
    """The tests' statements, for the judgement; they do not name the tested program."""
    shared: bool = False
    """Whether calls and judgement need a statement in common, where a program may find what is expected."""


def split(expression: ast.expr, helpers: Iterable[ast.stmt], known: Iterable[str]) -> Split | None:
    """The two parts; None where they cannot be told apart.

    ``helpers``: the tests' own statements; ``known``: further names that are not the tested program's. Not
    told apart are e.g. a call in a loop over it (``all(f(i) == i for i in range(3))``), the program's
    function as an argument, an instance of its class.
    """
    statements = list(helpers)
    names = _BUILTINS.union(known, *map(bound_names, statements))
    local = bound_names(expression)
    splitter = _Splitter(names, local)
    copy = ast.parse(ast.unparse(expression), mode="eval").body
    judgement = splitter.visit(copy)
    left = [node.id for node in ast.walk(judgement) if isinstance(node, ast.Name)]
    if not splitter.calls or any(name not in names | local | {"ARGUMENTS"} for name in left):
        return None
    if any(node_names(statement) - names - bound_names(statement) for statement in statements):
        return None
    texts = (ast.unparse(statement) for statement in statements)
    said = ast.unparse(judgement)
    both = set(needed(splitter.calls, statements)) & set(needed([said], statements))
    shared = any(bound_names(statement) and not _is_harmless(statement) for statement in both)
    return Split(tuple(splitter.calls), said, "\n".join(texts), shared)


def needed(expressions: Iterable[str], helpers: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Those of the ``helpers`` that the expressions need, and that these need, in their order.

    A definition or an assignment is needed for a name that it binds; any other statement, such as a loop,
    also for one of the helpers' names that it reads, which it may change. What is harmless, or has to do with
    none of these names, is always among them. ValueError for what is no Python.
    """
    names = [_names(ast.unparse(statement)) for statement in helpers]
    own = frozenset[str]().union(*(each.bound for each in names))
    reasons = [_reasons(statement, each, own) for statement, each in zip(helpers, names, strict=True)]
    wanted = set[str]().union(*(_names(text).read for text in expressions))
    kept: set[int] = set()
    while found := {
        number
        for number, reason in enumerate(reasons)
        if number not in kept and (not reason or not reason.isdisjoint(wanted))
    }:
        kept |= found
        wanted.update(*(names[number].read for number in found))
    return [helpers[number] for number in sorted(kept)]


def _reasons(statement: ast.stmt, names: _Names, own: frozenset[str]) -> frozenset[str]:
    """The names for which a statement is needed; none if it always is. ``own``: all that the helpers bind."""
    if _is_harmless(statement):
        return frozenset()
    if isinstance(statement, _DEFINITIONS) and names.bound:
        return names.bound
    return names.bound | (names.read & own)


def _is_harmless(statement: ast.stmt) -> bool:
    """Whether it gives no answer away: an import, or a class whose methods are all special (``__init__``)."""
    methods = (ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(statement, (ast.Import, ast.ImportFrom)) or (
        isinstance(statement, ast.ClassDef)
        and all(item.name.startswith("__") for item in statement.body if isinstance(item, methods))
    )


@dataclass(frozen=True)
class _Names:
    """The names of its module that a piece of code binds and reads."""

    bound: frozenset[str]
    read: frozenset[str]


def _names(source: str) -> _Names:
    try:
        table = symtable.symtable(source, "<test>", "exec")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source[:80]!r} is not Python: {error}") from None
    bound = (symbol for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported())
    return _Names(frozenset(symbol.get_name() for symbol in bound), frozenset(_read(table)))


def _read(table: symtable.SymbolTable) -> Iterator[str]:
    """The names of the module that are read in a scope, and in those within it."""
    top = table.get_name() == "top"
    yield from (s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global()))
    for inner in table.get_children():
        yield from _read(inner)


def bound_names(tree: ast.AST) -> frozenset[str]:
    """The names that a statement or an expression binds, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= _starred(node.module or "")
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return frozenset(found)


def _starred(module: str) -> set[str]:
    """The names of ``from module import *``, for the modules that tests import so."""
    if module not in _STARRED:
        return set()
    found = importlib.import_module(module)
    return set(getattr(found, "__all__", [name for name in dir(found) if not name.startswith("_")]))


def node_names(tree: ast.AST) -> frozenset[str]:
    """The names that it reads."""
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


class _Splitter(ast.NodeTransformer):
    """Replaces calls of names that are not ``known`` by ARGUMENTS[n]."""

    def __init__(self, known: frozenset[str], local: frozenset[str]) -> None:
        self._known, self._local = known, local
        self.calls: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Take the call if it is the tested program's, and needs no name that the expression binds."""
        if not self._is_tested(node.func) or node_names(node) & self._local:
            return self.generic_visit(node)
        self.calls.append(ast.unparse(node))
        number = ast.Constant(len(self.calls) - 1)
        return ast.Subscript(ast.Name("ARGUMENTS", ast.Load()), number, ast.Load())

    def _is_tested(self, function: ast.expr) -> bool:
        """``f`` and ``solution.f``; ``Solution().f``, but not ``Solution``: its instances are not plain."""
        if isinstance(function, ast.Attribute):
            value = function.value
            if isinstance(value, ast.Call):
                return isinstance(value.func, ast.Name) and self._is_class(value.func)
            return isinstance(value, ast.Name) and self._is_own(value)
        return isinstance(function, ast.Name) and self._is_own(function) and not self._is_class(function)

    def _is_own(self, name: ast.Name) -> bool:
        return name.id not in self._known and name.id not in self._local

    def _is_class(self, name: ast.Name) -> bool:
        return self._is_own(name) and name.id[:1].isupper()
