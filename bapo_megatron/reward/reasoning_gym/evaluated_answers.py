"""Guard of reasoning-gym's verifiers that call ``eval``: only harmless answers of a model reach them.

The reward asks ``is_harmless`` before each verifier. Nine verifiers call ``eval`` on the model's text, or
sympy's ``parse_expr``, which calls it; five evaluate a text of the problem. Their input is parsed here first,
and must be a list of values, or arithmetic with a small result. Some other verifiers need unlimited time or
memory for a large number, or accept ``nan``. Used by ``reward.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARACTERS = 20_000
"""Limit in characters of an answer; a longer one is wrong."""

MAX_EVALUATED_CHARACTERS = 2_000
"""The same limit for an answer that is evaluated."""

_MAX_DEPTH = 60
_MAX_DIGITS = 18
_MAX_DEGREE = 200
"""Largest product of nested exponents, so that no result has more than some thousand digits."""

_FUNCTIONS = frozenset(
    (
        *("Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp", "ln"),
        *("log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)
"""Functions that an expression may call. Not ``Integral``: the derivative of ``Integral(f, x)`` is ``f``."""

_CONSTANTS = frozenset(("pi",))
_VALUES = (ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
_HEX_ARITHMETIC = re.compile(r"(?:0x[0-9a-f]{1,4}|(?:<<|>>) 0x[0-3](?![0-9a-f])|\*(?!\*)|[-+() ])*")
"""As generated: no power, and no shift by more than three bits."""
_LARGE_NUMBER = re.compile(r"\d{3}")
_EXPONENT = re.compile(r"\d[eE]")
_NO_NUMBER = re.compile(r"nan|inf", re.IGNORECASE)


def is_harmless(task: str, answer: str) -> bool:
    """Whether an answer may reach the verifier of ``task``; if not, it is wrong."""
    if len(answer) > MAX_CHARACTERS or "\0" in answer:
        return False
    check = _ANSWERS.get(task)
    return check is None or (len(answer) <= MAX_EVALUATED_CHARACTERS and check(answer))


def unsafe_entry(task: str, entry: Mapping[str, Any]) -> str | None:
    """Error of a problem whose own text the verifier of ``task`` would evaluate, or None.

    Dataset rows may come from anywhere.
    """
    if task not in _ENTRIES:
        return None
    name, check = _ENTRIES[task]
    text = entry["answer"] if name == "answer" else entry["metadata"].get(name)
    if isinstance(text, str) and len(text) <= MAX_CHARACTERS and check(text):
        return None
    return (
        f"extra_info.entry has the {name} {text!r:.80}, which {task}'s verifier would evaluate: it is refused"
    )


def _is_value(answer: str) -> bool:
    """Whether it is made of numbers, strings, names and lists of them, or is no Python at all."""
    tree = _parsed(answer)
    if tree is None:
        return True
    return _depth(tree) <= _MAX_DEPTH and all(isinstance(node, _VALUES) for node in ast.walk(tree))


def _is_arithmetic(answer: str) -> bool:
    """Whether it is made of numbers, ``+ - * /`` and brackets."""
    tree = _parsed(answer)
    return tree is not None and _depth(tree) <= _MAX_DEPTH and 0 < _degree(tree, False) <= _MAX_DEGREE


def _is_algebra(answer: str) -> bool:
    """Whether it is arithmetic with letters, powers and elementary functions."""
    tree = _parsed(answer)
    return tree is not None and _depth(tree) <= _MAX_DEPTH and 0 < _degree(tree, True) <= _MAX_DEGREE


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _depth(tree: ast.AST) -> int:
    """Depth of a tree, computed without recursion."""
    level, depth = [tree], 0
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _degree(node: ast.expr, letters: bool) -> float:
    """Degree of an expression in its numbers and letters; infinite if it is not allowed."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return (
                1.0
                if len(f"{value!r}".strip("-")) <= _MAX_DIGITS and abs(value) < 10**_MAX_DIGITS
                else _NEVER
            )
        case ast.Name(id=name) if letters and (len(name) == 1 or name in _CONSTANTS):
            return 1.0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _degree(operand, letters)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if letters:
            return _degree(left, letters) * max(1.0, _exponent(right))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return max(_degree(left, letters), _degree(right, letters))
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _degree(left, letters) + _degree(right, letters)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if letters and name in _FUNCTIONS:
            return _degree(argument, letters)
    return _NEVER


def _exponent(node: ast.expr) -> float:
    """Size of an exponent: a number, a quotient of numbers, or a letter; infinite for others."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return abs(float(value)) if abs(value) <= _MAX_DEGREE else _NEVER
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int())):
            return _exponent(left)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _exponent(left) * _exponent(right)
        case ast.Name(id=name) if len(name) == 1:
            return 1.0
    return _NEVER


_NEVER = float("inf")

_ANSWERS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _is_value),
    **dict.fromkeys(("countdown", "puzzle24"), _is_arithmetic),
    **dict.fromkeys(
        ("intermediate_integration", "polynomial_multiplication", "simple_integration"), _is_algebra
    ),
    **dict.fromkeys(("rubiks_cube", "rush_hour"), lambda answer: not _LARGE_NUMBER.search(answer)),
    "coin_flip": lambda answer: not _EXPONENT.search(answer),  # 1e999999999 as a fraction
    "complex_arithmetic": lambda answer: not _NO_NUMBER.search(answer),  # min(1, nan) is 1
    "propositional_logic": lambda _: True,  # it is parsed, and so must be short
}
_ENTRIES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "bitwise_arithmetic": ("problem", lambda text: _HEX_ARITHMETIC.fullmatch(text) is not None),
    "intermediate_integration": ("integrand", _is_algebra),
    "number_sorting": ("answer", _is_value),
    "polynomial_multiplication": ("answer", _is_algebra),
    "simple_integration": ("integrand", _is_algebra),
}
