"""Comparison of math answers by math-verify, for the main thread of a worker process that may be killed.

``equal`` compares an answer with a ground truth, ``parses`` and ``is_operation`` classify a ground truth; all
return False if undecided. A signal limits CPU time: math-verify's own wall-clock limit would count correct
answers as wrong on a busy machine. A long operation on big integers (``9^{9^{9}}``) delays even the signal.

Answers with the same text are equal, whether or not math-verify can read them. If math-verify calls two
answers equal, their sympy expressions are checked again, unless one was read as plain text: math-verify also
accepts unevaluated operations and small numbers that differ a little. Expressions that reach these checks are
small enough for sympy. The import takes half a second, so only comparing workers do it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.logic import And
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

from bapo_megatron.reward.answer_text import has_quotient, named_operations, number_sides, same_text
from bapo_megatron.reward.answer_words import (
    are_times,
    counterparts,
    is_fragment,
    is_literal,
    is_range,
    marks,
    reading,
    split_name,
    without_unit_letter,
)
from bapo_megatron.reward.cpu_time import OutOfTime, cpu_limit

CPU_LIMIT_S = 2
"""CPU time limit in seconds for each parse or check. Most answers need less than 0.1 s."""

DECIMAL_TOLERANCE = 1e-5
"""Maximum relative difference of a decimal from the exact value; math-verify compares six decimals."""

ROUNDING = 0.1
"""Maximum relative difference between a number and its decimal in one equation: ``1/3 = 0.3``."""

EXACT_TOLERANCE = 1e-12
"""Maximum relative difference between values without decimals."""

_NORMALIZATION = NormalizationConfig(units=False, malformed_operators=True, nits=True)
"""math-verify's own without units, where it would also drop variables at the end."""
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_NOTHING = 1e-25
_DIGITS = 30
EQUATION_DIGITS, EQUATION_TOLERANCE = 60, 1e-45
"""Small coefficients appear beside large ones in equations, so more digits must agree."""
_LARGEST_EXPONENT = 100


def equal(ground_truth: str, answer: str, allow_operations: bool = False) -> bool:
    r"""Whether ground truth and answer are equal; False if that cannot be decided. Unevaluated arithmetic is
    not an answer, unless the ground truth has some or ``allow_operations`` is set. Operations with a name
    (``\sum``, ``\log``) are compared before, as text (math.py)."""
    if same_text(ground_truth, answer):  # math-verify may not be able to read it
        return True
    try:
        return _same_answer(ground_truth, answer, allow_operations)
    except (Exception, OutOfTime):  # sympy raises anything on nonsense, even MemoryError
        return False


def _same_answer(ground_truth: str, answer: str, allow_operations: bool) -> bool:
    (name, truth), (other, said) = split_name(ground_truth), split_name(answer)
    if name and other and name != other:
        return False
    if not any(map(str.isalpha, truth)):
        said = without_unit_letter(said)
    first, second = reading(truth), reading(said)
    if first.is_text:
        return second.is_text and first.items == second.items
    pairs = [(truth, said)] if second.is_text and not first.words else counterparts(first, second)
    if pairs is None or not all(_same_part(*pair, allow_operations) for pair in pairs):
        return False
    with cpu_limit(CPU_LIMIT_S):
        return not _contradicts_itself(answer)


def _same_part(ground_truth: str, answer: str, allow_operations: bool) -> bool:
    if ground_truth == answer or same_text(ground_truth, answer):
        return True
    if not (ground_truth and answer) or marks(ground_truth) != marks(answer):
        return False
    if (
        any(map(is_literal, (ground_truth, answer)))
        or is_range(ground_truth)
        or are_times(ground_truth, answer)
    ):
        return False
    expected, actual = _parse(ground_truth), _parse(answer)
    with cpu_limit(CPU_LIMIT_S):
        expected, actual = _as_interval(expected, actual), _as_interval(actual, expected)
        if not verify(expected, actual, timeout_seconds=None):
            return False
    with cpu_limit(CPU_LIMIT_S):
        return _is_an_answer(expected, actual, ground_truth, answer, allow_operations)


def _as_interval(read: list[Any], other: list[Any]) -> list[Any]:
    """Return inequalities (``x < 2``) as an interval or union if the other answer is one."""
    if not (read and other and isinstance(other[0], (sympy.Interval, sympy.Union))):
        return read
    parts = list(read[0].args) if isinstance(read[0], sympy.FiniteSet) else read[:1]
    if not all(map(_is_inequality, parts)) or len(set().union(*(part.free_symbols for part in parts))) != 1:
        return read
    return [sympy.Union(*(part.as_set() for part in parts))]


def _is_an_answer(
    expected: list[Any], actual: list[Any], ground_truth: str, answer: str, allow_operations: bool
) -> bool:
    truth, said = expected[0], actual[0]
    if isinstance(truth, str) or isinstance(said, str):
        return True  # equal as text
    if differ(truth, said):
        return False
    if allow_operations or is_symbolic(truth) or are_rearranged(truth, said):
        return True  # an equation has as many forms as a formula
    whole = are_integers(truth) and not has_quotient(ground_truth)
    is_left = has_arithmetic(said) or (whole and has_quotient(answer)) or hides_rational(truth, said)
    return not is_left or has_arithmetic(truth)


def _contradicts_itself(answer: str) -> bool:
    """Whether an equation has two different numbers: ``6 = 5``."""
    for sides in number_sides(answer):
        numbers = [_parse_unlimited(side)[0] for side in sides] if len(sides) > 1 else []
        if any(disagree(number, other) for number, other in pairwise(numbers)):
            return True
    return False


def is_operation(ground_truth: str) -> bool:
    """Whether a ground truth is itself an unevaluated operation."""
    try:
        parsed = _parse(ground_truth)[0]
        return bool(
            named_operations(ground_truth) or (not isinstance(parsed, str) and has_arithmetic(parsed))
        )
    except (Exception, OutOfTime):  # as above
        return False


def parses(ground_truth: str) -> bool:
    """Whether a ground truth can be compared: math-verify parses each part of its mathematics."""
    try:
        truth = reading(split_name(ground_truth)[1])
        parts = [part for part in truth.parts if part and not (is_literal(part) or is_fragment(part))]
        readable = all(any(not isinstance(value, str) for value in _parse(part)) for part in parts)
        return truth.is_text or (readable and any((*truth.parts, *truth.words)))
    except (Exception, OutOfTime):  # as above
        return False


def _parse(answer: str) -> list[Any]:
    with cpu_limit(CPU_LIMIT_S):
        return _parse_unlimited(answer)


def _parse_unlimited(answer: str) -> list[Any]:
    """Parse without a CPU limit, for callers within one: limits do not nest."""
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALIZATION)]
    parts: list[Any] = parse(rf"\boxed{{{answer}}}", config, parsing_timeout=None)
    return parts


# --- checks of an answer's expression; they may raise whatever sympy does ------------------------


def has_arithmetic(expression: Any) -> bool:
    """Whether an answer has sums, products, powers or roots of numbers, which it should have evaluated."""
    return any(map(_reducible, _parts(expression)))


def is_symbolic(expression: Any) -> bool:
    """Whether an answer is a formula with symbols, which has many equal forms; ``x = 3`` is not."""
    return any(part.free_symbols for part in _parts(expression))


def are_integers(expression: Any) -> bool:
    """Whether an answer consists only of integers."""
    return all(isinstance(part, sympy.Integer) for part in _parts(expression))


def hides_rational(truth: Any, answer: Any) -> bool:
    """Whether roots, symbols or constants of an answer cancel, so that it equals a rational truth."""
    pairs = list(zip(_parts(truth), _parts(answer), strict=False))
    return any(left.is_Rational and _cancels(left, right) for left, right in pairs)


def differ(truth: Any, answer: Any) -> bool:
    """Whether two answers that math-verify calls equal differ by more than a relative tolerance. math-verify
    compares absolute differences, and accepts 5% for 5."""
    if isinstance(truth, sympy.Eq) and isinstance(answer, sympy.Eq):
        if _is_solved(truth) != _is_solved(answer):  # the question again
            return _is_solved(truth)
        if are_rearranged(truth, answer):
            return not _proportional(truth, answer)
    left, right = list(_parts(truth)), list(_parts(answer))
    symbols = sorted(set().union(*(part.free_symbols for part in (*left, *right))), key=str)
    if len(left) != len(right) or (symbols and _is_inequality(truth)):
        return False
    places = {symbol: sympy.Rational(7 * n + 11, 5 * n + 9) for n, symbol in enumerate(symbols)}
    if any(isinstance(symbol, sympy.FiniteSet) or _is_inequality(symbol) for symbol in (truth, answer)):
        left, right = _ordered(left, places), _ordered(right, places)
    return any(_far(symbol, other, places) for symbol, other in zip(left, right, strict=True))


def are_rearranged(truth: Any, answer: Any) -> bool:
    """Whether both are equations with different left sides: ``x + y = 3`` and ``y = 3 - x``."""
    both = isinstance(truth, sympy.Eq) and isinstance(answer, sympy.Eq)
    return both and truth.lhs != answer.lhs


def disagree(value: Any, other: Any) -> bool:
    """Whether two sides of an equation are different numbers, even allowing for rounded decimals."""
    if not all(isinstance(side, sympy.Expr) and side.is_number for side in (value, other)):
        return False
    rounding = ROUNDING if value.has(sympy.Float) or other.has(sympy.Float) else EXACT_TOLERANCE
    left, right = sympy.N(value.doit(), _DIGITS), sympy.N(other.doit(), _DIGITS)
    return bool(abs(left - right) > rounding * max(abs(left), abs(right)))


# --- parts ---------------------------------------------------------------------------------------


def _parts(expression: Any) -> Iterator[Any]:
    """Yield the values in an answer: members, bounds, entries; for ``a = 3`` and ``a = b = 3`` the 3."""
    if isinstance(expression, And):
        relations = list(expression._unsorted_args)
        chain = all(
            part.rhs == other.lhs for part, other in pairwise(relations) if isinstance(part, Relational)
        )
        for part in relations[-1:] if chain and not _is_inequality(expression) else relations:
            yield from _parts(part)
    elif isinstance(expression, sympy.Eq):
        sides = expression.args if expression.rhs.free_symbols else (expression.rhs,)
        for side in sides:
            yield from _parts(side)
    elif isinstance(expression, sympy.Interval):
        yield from (bound for bound in (expression.start, expression.end) if not bound.is_infinite)
    elif _is_inequality(expression) and any(side.is_Symbol for side in expression.args):
        numbers = [side for side in expression.args if not side.free_symbols]
        yield from numbers or expression.args
    elif isinstance(expression, sympy.MatrixBase):
        yield from expression.flat()
    elif isinstance(expression, (sympy.Set, sympy.Tuple, Relational)):
        for part in expression.args:
            yield from _parts(part)
    else:
        yield expression


def _is_inequality(expression: Any) -> bool:
    if isinstance(expression, And):
        return all(_is_inequality(part) for part in expression._unsorted_args)
    return isinstance(expression, Relational) and not isinstance(expression, sympy.Eq)


# --- equations -----------------------------------------------------------------------------------


def _is_solved(equation: Any) -> bool:
    side, other = equation.args
    return (side.is_Symbol and not other.free_symbols) or (other.is_Symbol and not side.free_symbols)


def _proportional(truth: Any, answer: Any) -> bool:
    """Whether two equations, without denominators, are proportional at every test point."""
    first, other = (sympy.together((e.lhs - e.rhs).doit()).as_numer_denom()[0] for e in (truth, answer))
    symbols = sorted(first.free_symbols | other.free_symbols, key=str)
    decimal = truth.has(sympy.Float) or answer.has(sympy.Float)
    tolerance = DECIMAL_TOLERANCE if decimal else EQUATION_TOLERANCE
    values_at = []
    for shift in (11, 29, 53):
        place = {symbol: sympy.Rational(7 * n + shift, 5 * n + 9) for n, symbol in enumerate(symbols)}
        values_at.append([sympy.N(side.subs(place).doit(), EQUATION_DIGITS) for side in (first, other)])
    if not all(value.is_number and value.is_finite for values in values_at for value in values):
        return True
    crossed = [(a * d, b * c) for (a, b), (c, d) in pairwise(values_at)]
    return all(abs(x - y) <= tolerance * max(abs(x), abs(y)) for x, y in crossed)


# --- operations on numbers -----------------------------------------------------------------------


def _reducible(node: Any) -> bool:
    """Whether the node has an unevaluated sum, product or power of numbers; fractions count as numbers."""
    if not node.args or node == _PERCENT:
        return False
    if not node.free_symbols:
        check = {sympy.Add: _is_sum, sympy.Mul: _is_product, sympy.Pow: _is_power}.get(node.func)
        if check is not None and check(node):
            return True
        if isinstance(node, (sympy.Abs, sympy.UnevaluatedExpr)):
            return True
    return any(_reducible(part) for part in node.args)


def _is_sum(node: Any) -> bool:
    """Whether two terms are rational or share a root: 1 + 2, sqrt(8) + sqrt(2)."""
    terms = list(_flat(sympy.Add, node))
    if sum(_is_rational(term) for term in terms) >= 2:
        return True
    kinds = [term.doit().as_coeff_Mul()[1] for term in terms if not _is_rational(term)]
    return len(set(kinds)) < len(kinds)


def _is_product(node: Any) -> bool:
    """Whether two numeric factors are above or below a fraction line: 3 * 4, 1/2 * 1/3."""
    above = below = 0
    for factor in _flat(sympy.Mul, node):
        turned = isinstance(factor, sympy.Pow) and factor.exp == -1
        for part in _flat(sympy.Mul, factor.base) if turned else (factor,):
            if isinstance(part, sympy.Float):
                top, bottom = 1, 0
            elif isinstance(part, sympy.Rational):
                top, bottom = int(abs(part.p) != 1), int(part.q != 1)
            else:
                continue
            above, below = (above + bottom, below + top) if turned else (above + top, below + bottom)
    return above >= 2 or below >= 2


def _is_power(node: Any) -> bool:
    """Whether the node is an integer power of a number other than ten and constants, or a rational root."""
    base, exponent = node.base, node.exp
    if not isinstance(exponent, sympy.Rational) or isinstance(base, sympy.NumberSymbol):
        return False
    if isinstance(exponent, sympy.Integer):
        return bool(exponent != -1 and base != 10)
    if not isinstance(base, sympy.Rational) or abs(exponent.p) > _LARGEST_EXPONENT:
        return False
    return bool(sympy.Pow(base, exponent).is_Rational)


def _flat(kind: Any, node: Any) -> Iterator[Any]:
    if isinstance(node, kind):
        for part in node.args:
            yield from _flat(kind, part)
    else:
        yield node


def _is_rational(node: Any) -> bool:
    """Whether the node combines rational numbers by sums, products and integer powers only."""
    if isinstance(node, sympy.Pow) and not isinstance(node.exp, sympy.Integer):
        return False
    if node.args:
        known = isinstance(node, (sympy.Add, sympy.Mul, sympy.Pow, sympy.UnevaluatedExpr, sympy.Abs))
        return known and all(_is_rational(part) for part in node.args)
    return isinstance(node, (sympy.Rational, sympy.Float))


def _cancels(truth: Any, answer: Any) -> bool:
    if answer.free_symbols:
        return True
    if _is_rational(answer):
        return False
    return bool(abs(sympy.N(answer - truth, _DIGITS)) < EXACT_TOLERANCE * max(1, abs(truth)))


# --- differences ---------------------------------------------------------------------------------


def _ordered(parts: Iterable[Any], places: dict[Any, Any]) -> list[Any]:
    def place(part: Any) -> tuple[float, float]:
        value = complex(sympy.N(part.subs(places), _DIGITS))
        return value.real, value.imag

    try:
        return sorted(parts, key=place)
    except TypeError:  # not a number
        return list(parts)


def _far(truth: Any, answer: Any, places: dict[Any, Any]) -> bool:
    if truth == answer:
        return False
    if _has_percent(truth) and not _has_percent(answer):  # a question that asks for percent
        bare = truth.xreplace({_PERCENT: sympy.Integer(1)})
        return _apart(truth, answer, places) and _apart(bare, answer, places)
    return _apart(truth, answer, places)


def _has_percent(expression: Any) -> bool:
    return any(node == _PERCENT for node in sympy.preorder_traversal(expression))


def _apart(truth: Any, answer: Any, places: dict[Any, Any]) -> bool:
    left, right = truth.subs(places).doit(), answer.subs(places).doit()
    value, other = sympy.N(left, _DIGITS), sympy.N(right, _DIGITS)
    if not (value.is_number and other.is_number and value.is_finite and other.is_finite):
        return False
    size = max(abs(value), abs(other))
    if size < _NOTHING or min(abs(value), abs(other)) < _NOTHING:
        return (left - right).equals(0) is False
    decimal = truth.has(sympy.Float) or answer.has(sympy.Float)
    return bool(abs(value - other) > (DECIMAL_TOLERANCE if decimal else EXACT_TOLERANCE) * size)
