"""Splitter of assert expressions into what the tested program computes and how the result is judged.

``split`` turns ``abs(f(1) - 0.5) < 1e-6`` into the call ``f(1)`` and the judgement ``abs(ARGUMENTS[0] - 0.5)
< 1e-6`` (a ``Split``). The program's process runs the call and returns a plain value; a process that never
ran the program evaluates the judgement. So neither an object that claims to equal everything nor a replaced
builtin passes a test. ``Helpers`` chooses the helper statements for each process.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

BUILTINS = frozenset(dir(builtins))

_STARRED = frozenset(
    (
        *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools"),
        *("heapq", "io", "itertools", "json", "math", "operator", "random", "re", "statistics", "string"),
        *("sys", "typing"),
    )
)


USUAL = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, isqrt, log2, pi, sqrt
from typing import *
"""

PRELUDE = f"""
from string import *
from re import *
from datetime import *
from copy import *
from random import *
from statistics import *
from operator import *
from io import *
from sys import *
from json import *
from math import *
{USUAL}
import builtins, copy, datetime, io, json, operator, statistics
for _name in [name for name in vars(builtins) if name[0] != "_" and name in globals()]:
    del globals()[_name]
bisect = partial(bisect_right)
vars(bisect).update(vars(sys.modules["bisect"]))
"""
"""Imports that LeetCode and LiveCodeBench give to a solution. Where they differ, both work: ``bisect`` is the
function and the module. Python's own builtins (``pow``) stay, so tests may replace them. In an assert, names
in `USUAL` never count as the tested program's."""

NODES = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right

def list_node(values):
    head = None
    for value in reversed(values or []):
        head = ListNode(value, head)
    return head

def is_same_list(one, other):
    while one and other and one.val == other.val:
        one, other = one.next, other.next
    return one is None and other is None

def tree_node(values):
    nodes = [None if value is None else TreeNode(value) for value in values or []]
    below = iter(nodes[1:])
    for node in filter(None, nodes):
        node.left, node.right = next(below, None), next(below, None)
    return nodes[0] if nodes else None

def is_same_tree(one, other):
    if one is None or other is None or one.val != other.val:
        return one is other is None
    return is_same_tree(one.left, other.left) and is_same_tree(one.right, other.right)
"""
"""LeetCode's lists and trees, with the functions that its test sets use to build and compare them."""


@dataclass(frozen=True)
class Split:
    """Source text of an assert's two parts: the program's calls and the judgement."""

    calls: tuple[str, ...]
    judgement: str
    """Expression in the call values ARGUMENTS[0], ARGUMENTS[1], ..."""
    helpers: str = ""
    """Test statements for the judgement; they do not name the tested program."""


def split(expression: ast.expr, known: Iterable[str], helpers: str = "") -> Split | None:
    """Split an expression into calls and judgement, or return None if that is impossible.

    ``known``: names that do not belong to the tested program, besides builtins, including those of
    ``helpers``. Impossible cases include a call in a comprehension (``all(f(i) == i for i in range(3))``),
    the program's function as an argument, and an instance of its class.
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
    """Return the names that a statement or expression binds, at any depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names |= _starred(node.module or "")
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return frozenset(names)


def _starred(module: str) -> set[str]:
    """Return the names that ``from module import *`` binds, for modules that tests import this way."""
    if module not in _STARRED:
        return set()
    imported = importlib.import_module(module)
    return set(getattr(imported, "__all__", [name for name in dir(imported) if not name.startswith("_")]))


@lru_cache(maxsize=64)
def names_of(source: str) -> frozenset[str]:
    """Return the names that the source binds; ``import *`` counts for the modules in PRELUDE."""
    try:
        return bound_names(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()


def node_names(tree: ast.AST) -> frozenset[str]:
    """Return the names in a tree."""
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


class _Splitter(ast.NodeTransformer):
    """Replaces calls of names that are not ``known`` with ARGUMENTS[n]."""

    def __init__(self, known: frozenset[str], local: frozenset[str]) -> None:
        self._known, self._local = known, local
        self.calls: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of the tested program unless it needs a name that the expression binds."""
        if not self._is_tested(node.func) or node_names(node) & self._local:
            return self.generic_visit(node)
        self.calls.append(ast.unparse(node))
        number = ast.Constant(len(self.calls) - 1)
        return ast.Subscript(ast.Name("ARGUMENTS", ast.Load()), number, ast.Load())

    def _is_tested(self, function: ast.expr) -> bool:
        """Whether it is ``f``, ``solution.f`` or ``Solution().f``; ``Solution()`` alone is no plain value."""
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


# --- helper statements ---------------------------------------------------------------------------

_HIDES_NAMES = frozenset(("eval", "exec", "globals", "locals", "vars", "compile", "__import__"))
"""Builtins that reach any name, so that the names in code do not show what it reads."""

_SPECIAL = frozenset(("__init__", "__repr__", "__str__", "__eq__", "__hash__", "__lt__"))
_FEW = (0, 1, -1, None, "", Ellipsis)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Helpers:
    """Helper statements around a problem's asserts: methods return which of them (as indices) a process
    needs, and whether they may leak answers. Never runs them."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self._statements = statements
        self._binds = [_bound(statement) for statement in statements]
        self._reads = [node_names(statement) for statement in statements]
        self.names = frozenset[str]().union(*map(bound_names, statements))
        """Names that the statements bind, at any depth."""

    def needed(self, names: Iterable[str]) -> frozenset[int]:
        """Return the statements that bind the names, with all their dependencies."""
        numbers: set[int] = set()
        wanted = set(names)
        while more := {
            number
            for number, binds in enumerate(self._binds)
            if number not in numbers and not binds.isdisjoint(wanted)
        }:
            numbers |= more
            wanted.update(*(self._reads[number] | self._binds[number] for number in more))
        return frozenset(numbers)

    def beside(self, used: Iterable[str], judged: Iterable[str]) -> frozenset[int]:
        """Return the statements that the tested program's process gets. ``used``: names read in that process;
        ``judged``: names on the expected side, evaluated elsewhere."""
        used, everything = set(used), frozenset(range(len(self._statements)))
        if self.hide_names:
            return everything
        expected = self.needed(judged)
        stay = {number for number in everything if number not in expected or not self._is_removable(number)}
        return self.needed(used.union(*(self._reads[n] | self._binds[n] for n in stay))) | stay

    def stand_alone(self, known: frozenset[str]) -> bool:
        """Whether the statements run without the tested program, given further ``known`` names."""
        names = BUILTINS | known | self.names
        return all(reads <= names for reads in self._reads)

    @property
    def hide_names(self) -> bool:
        """Whether the statements use builtins (eval, globals, ...) that can read any name."""
        return not _HIDES_NAMES.isdisjoint(frozenset[str]().union(*self._reads))

    def may_leak_answers(self, numbers: Iterable[int]) -> bool:
        """Whether the statements may leak an answer: anything but imports and pure value classes may."""
        return any(not self._is_inert(self._statements[number]) for number in numbers)

    def idle_functions(self, used: Iterable[str]) -> frozenset[int]:
        """Return the functions that no test reads: helpers for the program, or a reference solution."""
        return frozenset(
            number
            for number, statement in enumerate(self._statements)
            if isinstance(statement, _Function)
            and statement.name not in set(used).union(*self._reads[:number], *self._reads[number + 1 :])
        )

    def text(self, numbers: Iterable[int] | None = None) -> str:
        """Return the source text of all statements, or of the given ones, in order."""
        chosen = range(len(self._statements)) if numbers is None else sorted(numbers)
        return "\n".join(ast.unparse(self._statements[number]) for number in chosen)

    def _is_removable(self, number: int) -> bool:
        """Whether the statement may be omitted because it only binds one name."""
        statement = self._statements[number]
        if isinstance(statement, _Function):
            defaults = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
            return not statement.decorator_list and all(
                isinstance(default, ast.Constant) for default in defaults
            )
        if not isinstance(statement, ast.Assign):
            return False
        targets = statement.targets
        return len(targets) == 1 and isinstance(targets[0], ast.Name) and _is_literal(statement.value)

    def _is_inert(self, statement: ast.stmt) -> bool:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return True
        if not isinstance(statement, ast.ClassDef):
            return False
        own = frozenset[str]().union(*self._binds) - {statement.name}
        inside = [node for item in statement.body for node in ast.walk(item)]
        return (
            all(item.name in _SPECIAL for item in statement.body if isinstance(item, _Function))
            and all(node.value in _FEW for node in inside if isinstance(node, ast.Constant))
            and not any(isinstance(node, ast.Lambda) for node in inside)
            and own.isdisjoint(node_names(statement))
        )


def defined(tree: ast.Module) -> frozenset[str]:
    """Return the names that a module's statements bind in its scope."""
    return frozenset[str]().union(*map(_bound, tree.body))


def _bound(statement: ast.stmt) -> frozenset[str]:
    """Return the names that a statement binds in its scope; at any depth unless it is a definition."""
    if isinstance(statement, (*_Function, ast.ClassDef)):
        return frozenset((statement.name,))
    return bound_names(statement)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
