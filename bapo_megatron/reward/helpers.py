"""Helper statements around a problem's asserts, and the choice of those that the tested program sees.

A reference solution or a table of results is left out if an honest program cannot need it: a plain function,
or a name bound to a literal, that only the expected side of asserts uses. All other statements stay, because
names do not show all that Python code does. Statements that stay and may leak answers are counted. Used by
``code_tests.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from bapo_megatron.reward.expressions import BUILTINS, bound_names, node_names

_HIDES_NAMES = frozenset(("eval", "exec", "globals", "locals", "vars", "compile", "__import__"))
"""Builtins by which code reaches any name: then names do not show what it reads."""

_SPECIAL = frozenset(("__init__", "__repr__", "__str__", "__eq__", "__hash__", "__lt__"))
_FEW = (0, 1, -1, None, "", Ellipsis)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Helpers:
    """Helper statements of a problem, by index; nothing of them is run.

    Made by ``code_tests.py`` for a problem of asserts.
    """

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self._statements = statements
        self._binds = [_bound(statement) for statement in statements]
        self._reads = [node_names(statement) for statement in statements]
        self.names = frozenset[str]().union(*map(bound_names, statements))
        """All names that the statements bind, at any depth."""

    def needed(self, names: Iterable[str]) -> frozenset[int]:
        """Statements that bind the names, with all that these need in turn."""
        found: set[int] = set()
        wanted = set(names)
        while more := {
            number
            for number, binds in enumerate(self._binds)
            if number not in found and not binds.isdisjoint(wanted)
        }:
            found |= more
            wanted.update(*(self._reads[number] | self._binds[number] for number in more))
        return frozenset(found)

    def beside(self, used: Iterable[str], judged: Iterable[str]) -> frozenset[int]:
        """Statements that the tested program's process gets.

        ``used``: names that are read there; ``judged``: names of the expected side, evaluated elsewhere.
        """
        used, everything = set(used), frozenset(range(len(self._statements)))
        if self.hide_names:
            return everything
        expected = self.needed(judged)
        stay = {number for number in everything if number not in expected or not self._is_removable(number)}
        return self.needed(used.union(*(self._reads[n] | self._binds[n] for n in stay))) | stay

    def stand_alone(self, known: frozenset[str]) -> bool:
        """Whether they run without the tested program. ``known``: more names that are not the program's."""
        names = BUILTINS | known | self.names
        return all(reads <= names for reads in self._reads)

    @property
    def hide_names(self) -> bool:
        """Whether they use builtins (eval, globals, ...) by which they can read any name."""
        return not _HIDES_NAMES.isdisjoint(frozenset[str]().union(*self._reads))

    def may_leak_answers(self, numbers: Iterable[int]) -> bool:
        """Whether they may leak an answer: all but imports, and classes that only hold values."""
        return any(not self._is_inert(self._statements[number]) for number in numbers)

    def idle_functions(self, used: Iterable[str]) -> frozenset[int]:
        """Functions that no test reads: helpers for the program, or a reference solution."""
        return frozenset(
            number
            for number, statement in enumerate(self._statements)
            if isinstance(statement, _Function)
            and statement.name not in set(used).union(*self._reads[:number], *self._reads[number + 1 :])
        )

    def text(self, numbers: Iterable[int] | None = None) -> str:
        """Source text of all of them, or of some, in their order."""
        chosen = range(len(self._statements)) if numbers is None else sorted(numbers)
        return "\n".join(ast.unparse(self._statements[number]) for number in chosen)

    def _is_removable(self, number: int) -> bool:
        """Whether it may be left out: it only binds one name."""
        statement = self._statements[number]
        if isinstance(statement, _Function):
            defaults = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
            return not statement.decorator_list and all(isinstance(one, ast.Constant) for one in defaults)
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


def _bound(statement: ast.stmt) -> frozenset[str]:
    """Names that a statement binds in its scope; unless it is a definition, at any depth."""
    if isinstance(statement, (*_Function, ast.ClassDef)):
        return frozenset((statement.name,))
    return bound_names(statement)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
