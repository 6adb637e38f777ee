"""Splitter of assert expressions: calls of the tested program, and a judgement of their values.

``abs(f(1) - 0.5) < 1e-6`` is split into the call ``f(1)`` and ``abs(ARGUMENTS[0] - 0.5) < 1e-6``. The call
runs in the program's process, which gives a plain value; the judgement runs in a process that the program
never ran in. So neither an object that claims to equal everything nor a replaced builtin passes a test.
Used by ``code.py`` and ``code_tests.py``.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterable
from dataclasses import dataclass

BUILTINS = frozenset(dir(builtins))

_STARRED = frozenset(
    (
        *("bisect", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
        *("math", "operator", "random", "re", "string", "typing"),
    )
)


@dataclass(frozen=True)
class Split:
    """An assert's expression in two parts, as source text: the program's calls, and the judgement."""

    calls: tuple[str, ...]
    """Expressions of the tested program."""
    judgement: str
    """Expression of their values ARGUMENTS[0], ARGUMENTS[1], ..."""
    helpers: str = ""
    """The tests' statements, for the judgement; they do not name the tested program."""


def split(expression: ast.expr, known: Iterable[str], helpers: str = "") -> Split | None:
    """Split an expression; None if that is impossible.

    ``known``: names besides the builtins that are not the tested program's, including those of ``helpers``.
    Impossible are e.g. a call in a comprehension (``all(f(i) == i for i in range(3))``), the program's
    function as an argument, an instance of its class.
    """
    names = BUILTINS.union(known)
    local = bound_names(expression)
    splitter = _Splitter(names, local)
    copy = ast.parse(ast.unparse(expression), mode="eval").body
    judgement = splitter.visit(copy)
    left = [node.id for node in ast.walk(judgement) if isinstance(node, ast.Name)]
    if not splitter.calls or any(name not in names | local | {"ARGUMENTS"} for name in left):
        return None
    return Split(tuple(splitter.calls), ast.unparse(judgement), helpers)


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
        """Replace the call if it is the tested program's, and needs no name that the expression binds."""
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
