"""Calculator environment: ``Calculator`` evaluates arithmetic expressions in the model's turns.

    environment.function = "bapo_megatron.environment.tools.calculator:Calculator"
    environment.settings = {"format": "plain"}

The observation is the value of each call in the turn, or an error. A turn without a call is the answer: it
ends the episode, and ``reward.function`` judges it. Imports only the standard library.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from bapo_megatron.environment import Environment, Reply, Task, Turn
from bapo_megatron.environment.settings import CalculatorSettings
from bapo_megatron.environment.tools.calls import answer_part, arguments, results

LONGEST = 1000
"""Maximum expression length in characters."""

MOST_BITS = 10_000
"""Maximum size of a numerator or denominator in bits: 3,010 digits."""

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})  # noqa: RUF001
_PLAIN = re.compile(r"[-+*/%^().,\d\s]+=?")
_OPERATOR = re.compile(r"\d[\s)]*[-+*/%^]")

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator(Environment):
    """Episode with a calculator: ``step`` returns the values of a turn's calls. Stateless."""

    resume = "restore"
    settings_type = CalculatorSettings

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self._format = CalculatorSettings(**settings).format

    def step(self, turn: str) -> Reply:
        """Return the values of the turn's calls, one message each. A turn without a call ends the episode."""
        calls = self._expressions(turn)
        if not calls:
            return Reply(None, metrics={"calls": 0.0, "call_errors": 0.0})
        values, errors = [], 0
        for call in calls:
            try:
                if isinstance(call, ValueError):
                    raise call
                values.append(evaluate(call))
            except ValueError as error:
                values.append(f"error: {error}")
                errors += 1
        return Reply(results(values), metrics={"calls": float(len(calls)), "call_errors": float(errors)})

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        """Do nothing: a calculator has no state."""

    def _expressions(self, turn: str) -> list[str | ValueError]:
        if self._format == "plain":
            line = answer_part(turn).strip().rpartition("\n")[2]
            return [line.rstrip("= ")] if _is_plain(line) else []
        return arguments(turn, "calculator", "expression")


def _is_plain(line: str) -> bool:
    """Whether a line is only an expression with an operator; ``=`` may follow. Takes linear time."""
    is_plain = _PLAIN.fullmatch(line) and _OPERATOR.search(line)
    return bool(is_plain) and line.rstrip("= \t)")[-1:].isdecimal()


def evaluate(expression: str) -> str:
    """Return the value of an expression of numbers, ``+ - * / // % ^ **`` and brackets, as text.

    Fractions are exact until written: ``0.1+0.2`` is 0.3, ``2/3`` is 0.666666666667 (12 digits). Raises
    ValueError, whose text the model reads, for anything else, also a root, and for numbers above
    ``MOST_BITS`` bits before computing them.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {LONGEST} may be")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression.translate(_SIGNS)).replace("^", "**").strip()
    try:
        tree = ast.parse(text, mode="eval")
        return _written(_value(tree.body))
    except SyntaxError:
        raise ValueError(f"{expression.strip()!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        try:
            return _bounded(Fraction(repr(node.value)))
        except ValueError:
            raise ValueError("the number is too large") from None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if operation := _OPERATIONS.get(type(node.op)):
            return _bounded(Fraction(operation(left, right)))
    raise ValueError(f"{ast.unparse(node)!r} is none of: numbers, + - * / // % ** and brackets")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and size * abs(exponent) > MOST_BITS:
        raise ValueError("the number is too large")
    return _bounded(Fraction(base**exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("the number is too large")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return format(float(value), ".12g")
    except OverflowError:
        raise ValueError("the number is too large") from None
