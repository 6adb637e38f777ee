r"""Extraction of a math answer from a response, and its normalized spelling; pure text functions.

``final_answer(response)`` returns the content of the last ``\boxed{}`` after the thinking part, or None,
``spelled`` its spelling for math-verify, and ``named_operations`` the kinds of operations in it. Operations
matter because math-verify evaluates its input: a restated question, ``\binom{10}{3}``, would count as its own
answer. Nothing here parses mathematics.
"""

from __future__ import annotations

import re

THINKING, THOUGHT = "<think>", "</think>"
"""Tags around the thinking part of a response. A chat template may put the first one into the prompt."""

_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)\s{0,9}\{|\\.|[{}]", re.DOTALL)
r"""``\boxed{`` (the backslash may be doubled), an escaped character, or a brace."""

_DIGITS = "0123456789"
_RAISED_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_SIGNS: dict[int, int | str] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full-width forms
    0x2212: "-",
    0x2013: "-",
    0x2032: "'",
    0x2033: "''",
    0x00D7: r"\times ",
    0x00B7: r"\cdot ",
    0x22C5: r"\cdot ",
    0x00F7: r"\div ",
    0x221E: r"\infty ",
    0x03C0: r"\pi ",
    0x00B0: r"^\circ ",
}
for _signs, _parts in (("½⅓⅔¼¾", "12 13 23 14 34"), ("⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "15 25 35 45 16 56 18 38 58 78")):
    _SIGNS |= {ord(s): rf"\frac{{{p[0]}}}{{{p[1]}}}" for s, p in zip(_signs, _parts.split(), strict=True)}
_RAISED = re.compile(f"[{_RAISED_DIGITS}]+")
_ROOT = re.compile(r"√\s{0,9}(?:\{([^{}]*)\}|\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_UNDERLINE = re.compile(r"\\underline\s{0,9}\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<![\d.,_^])[0-9]{1,3}(?:(?:\\[,!;: ]|[ ~\u00a0\u2009\u202f])[0-9]{3})+(?![\d/])")
_MIXED = re.compile(r"(?<![\d.,_^/])([0-9]{1,9})(?:\s|\\[ ,])\s{0,9}([1-9][0-9]{0,8})/([0-9]{1,9})(?![\d/.])")
r"""``3 1/2``."""
_ROOT_OF = re.compile(r"\\sqrt\s{0,9}\(([^()]*)\)")
_CONSTANT = re.compile(r"\\(?:text|math)(?:rm|it)?\s{0,9}\{\s{0,9}e\s{0,9}\}")
_PERCENT = re.compile(r"\s{0,9}(?:\\text\s{0,9}\{\s{0,9}percent\s{0,9}\}|(?<![A-Za-z])percent(?![A-Za-z]))")
_ORDINAL = re.compile(
    r"(?<=[0-9])\^\s{0,9}(?:\\(?:text|mathrm|mbox)\s{0,9}\{\s{0,9}(st|nd|rd|th)\s{0,9}\}"
    r"|\{\s{0,9}(?:\\(?:text|mathrm|mbox)\s{0,9}\{\s{0,9})?(st|nd|rd|th)\s{0,9}(?:\}\s{0,9}){1,2})"
)
_DEGREE = re.compile(r"\^\{\\circ\}|\^?\\degree(?![a-z])")
_DOLLAR = re.compile(r"(?<!\\)\$")
_SCIENTIFIC = re.compile(r"([+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?)[eE]([+-]?[0-9]{1,4})")
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])")
_IN_A_BASE = re.compile(r"-?[0-9A-Fa-f]+_\{?([0-9]{1,3}|[a-z]+)\}?")
_MODULUS = re.compile(r"\\[bp]?mod(?![a-z])[\s{]{0,9}([0-9]{1,40}|[a-z])")
_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve"
_BASES = {name: base for base, name in enumerate(_BASE_NAMES.split(), 2)}
_ANY_WORD = re.compile(r"[A-Za-z][a-z]{2,}|[Nn]o")
"""A word, not two adjacent variables."""

_NAMES = {
    "sum": ("sum", "prod", "∑", "∏"),
    "integral": ("int", "iint", "iiint", "oint", "∫"),
    "limit": ("lim", "liminf", "limsup"),
    "derivative": ("partial", "nabla"),
    "determinant": ("det", "vmatrix", "Vmatrix", "tr", "trace", "rank"),
    "combinatorics": ("binom", "dbinom", "tbinom", "choose", "genfrac", "nCr", "nPr"),
    "logarithm": ("log", "ln", "lg"),
    "divisor": ("gcd", "lcm", "hcf"),
    "modulo": ("mod", "bmod", "pmod"),
    "rounding": ("lfloor", "rfloor", "lceil", "rceil", "floor", "ceil", "⌊", "⌈"),
    "extremum": ("max", "min", "sup", "inf", "argmax", "argmin"),
    "complex": ("Re", "Im", "arg"),
    "trigonometry": tuple(
        f"{arc}{name}{hyperbolic}"
        for arc in ("", "arc", "ar")
        for name in ("sin", "cos", "tan", "cot", "sec", "csc")
        for hyperbolic in ("", "h")
    ),
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
"""Kind of each operation name."""

_COMMAND = re.compile(r"\\([A-Za-z]+)|([∑∏∫⌊⌈])")
_WORDS = re.compile(r"(?<![A-Za-z\\])(gcd|lcm|log|ln|mod|binom|choose|floor|ceil)(?![A-Za-z])")
_IN_COMMAND = re.compile(
    r"\\(operatorname|mathrm|text|begin)\*?\s{0,9}\{(?:\s|\\[ ,;])*([A-Za-z]+)\*?(?:\s|\\[ ,;])*\}"
)
_UNITS = frozenset(("min",))
r"""Names that are units of measurement in ``\text{...}``, and in ``\mathrm{...}`` after a number."""
_MEASURED = re.compile(r"[0-9}](?:\s|\\[ ,;:!]|~){0,9}$")
"""A number, or the closing brace of a fraction, before a unit."""
_FACTORIAL = re.compile(r"(?<!\\)!")
_DERIVED = re.compile(
    r"\\d?frac\s{0,9}\{?\s{0,9}(?:d|\\(?:math|text)rm\s{0,9}\{?\s{0,9}d\}?)(?:\^\{?\w\}?)?\s{0,9}[}{]|\bd/d[a-z]"
)
_SIDE_BY_SIDE = re.compile(r"[0-9](?:\s|\\[,;:!\s]|~|\\q?quad(?![a-z]))+[0-9]")
"""Two numbers with only white space between them: ``3 4``."""
_ONE_DIGIT = re.compile(
    r"[_^]\s{0,9}[0-9](?=\s)|\\(?:[dtc]?frac|[dt]?binom)\s{0,9}[0-9]\s{0,9}[0-9](?!\s{0,9}[0-9])"
)
r"""One-digit arguments without braces: ``_2`` in ``\log_2 3``, ``\frac 1 2``."""
_QUOTIENT = re.compile(r"[/:]|\\(?:[dtc]?frac|div)(?![a-z])")
_FONTS = re.compile(r"\\(?:mbox|boldsymbol|(?:text|math)(?:bf|it|rm|sf|tt|normal)?)\s{0,9}\{([^{}]*)\}")
_SPACES = re.compile(r"\s|\\[ ,;:!]|~")
_LIST_COMMA = re.compile(r",(?![0-9]{3}(?![0-9]))")
"""A comma between values, not between thousands."""
_NUMBER_SIDE = re.compile(
    r"(?=.*[0-9])(?!.*\.\.)"
    r"(?:[-+*/^(){}.,0-9\s]|\\(?:[,!; ]|(?:[dt]?frac|cdot|times|sqrt|left|right)(?![a-z])))++"
)
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-z])\s{0,9}")


def last_boxed(response: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{...}`` (or ``\fbox``), or None, in one pass."""
    open_braces: list[tuple[int, bool]] = []  # (start of the content, is a box)
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(response):
        if token.group().endswith("{") and token.group() != r"\{":
            open_braces.append((token.end(), len(token.group()) > 1))
        elif token.group() == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else response[last[0] : last[1]].strip()


def after_thinking(response: str, opens_thinking: bool = False) -> str:
    """Return the text after the last ``</think>``, up to any later ``<think>``; all of it without tags.
    ``opens_thinking``: the prompt ends with ``<think>``, so the response starts inside the thinking part."""
    response = THINKING + response if opens_thinking else response
    behind = response[response.rfind(THOUGHT) + len(THOUGHT) :] if THOUGHT in response else response
    return behind.partition(THINKING)[0]


def final_answer(response: str, opens_thinking: bool = False) -> str | None:
    """Return the last box ``after_thinking``, or None."""
    return last_boxed(after_thinking(response, opens_thinking))


def spelled(answer: str) -> str:
    r"""Return the answer in math-verify's spelling: ``½`` as ``\frac{1}{2}``, ``5\,000`` as ``5000``,
    ``1.5e3`` as ``1.5\times 10^{3}``, ``90°`` as ``90^\circ``, without Markdown marks, dollar signs,
    ``\underline`` and final period."""
    if not answer.isascii():
        answer = _RAISED.sub(_raised, answer)
        answer = _ROOT.sub(
            lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", answer.translate(_SIGNS)
        )
    answer = _EMPTY_SET.sub(lambda _: r"\emptyset", _UNDERLINE.sub(r"\1", _unmarked(answer)))
    answer = (
        _ROOT_OF.sub(r"\\sqrt{\1}", _CONSTANT.sub("{e}", answer))
        .replace(r"\text{:}", ":")
        .replace("{:}", ":")
    )
    answer = _DEGREE.sub(lambda _: r"^\circ ", answer)
    answer = _ORDINAL.sub(lambda match: rf"\text{{{match[1] or match[2]}}}", _PERCENT.sub(r"\\%", answer))
    answer = _THOUSANDS.sub(lambda number: "".join(c for c in number[0] if c in _DIGITS), answer)
    answer = _MIXED.sub(_mixed, answer)
    if number := _SCIENTIFIC.fullmatch(answer):
        return rf"{number[1]}\times 10^{{{int(number[2])}}}"
    return answer


def _unmarked(answer: str) -> str:
    text = _unpointed(answer.strip())
    for mark in ("**", "__", "*", "_", "`"):
        if text.startswith(mark) and text.endswith(mark) and len(text) > 2 * len(mark):
            text = text[len(mark) : -len(mark)].strip()
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub("", text).strip()
    return _unpointed(text)


def _unpointed(text: str) -> str:
    ends = text.endswith(".") and not text.endswith(("..", r"\right."))
    return text[:-1].rstrip() if ends else text


def _mixed(number: re.Match[str]) -> str:
    proper = int(number[2]) < int(number[3])
    return rf"{number[1]}\frac{{{number[2]}}}{{{number[3]}}}" if proper else number[0]


def _raised(digits: re.Match[str]) -> str:
    plain = "".join("-" if c == "⁻" else _DIGITS[_RAISED_DIGITS.index(c)] for c in digits[0])
    return f"^{{{plain}}}"


def named_operations(answer: str) -> frozenset[str]:
    """Return the kinds of operations in an answer; for ``a = b``, only those in ``b``."""
    text = _said(answer)
    operations = {KINDS[name] for name in _names(text) if name in KINDS}
    for pattern, kind in ((_FACTORIAL, "combinatorics"), (_DERIVED, "derivative")):
        if pattern.search(text):
            operations.add(kind)
    if has_numbers_side_by_side(text):
        operations.add("spaces")
    return frozenset(operations)


def _names(text: str) -> list[str]:
    return [
        *(command or sign for command, sign in _COMMAND.findall(text)),
        *(match[2] for match in _IN_COMMAND.finditer(text) if not is_unit(match, match[2])),
        *_WORDS.findall(text),
    ]


def is_unit(named: re.Match[str], name: str) -> bool:
    """Whether a name in a font command (group 1 of the match) is a unit of measurement, not an operation."""
    if name not in _UNITS:
        return False
    before = named.string[max(0, named.start() - 30) : named.start()]
    called = named.string[named.end() :].lstrip().startswith(("(", "{", r"\{", r"\left"))
    return named[1] == "text" or (not called and bool(_MEASURED.search(before)))


def has_quotient(answer: str) -> bool:
    """Whether an answer without words has a fraction or division."""
    return bool(_QUOTIENT.search(_said(answer)))


def _said(answer: str) -> str:
    """Return the answer without the left sides of equations outside of brackets."""
    parts, depth, start = [""], 0, 0
    for at, character in enumerate(f"{answer},"):
        depth += (character in "{([") - (character in "})]")
        if depth == 0 and character in ",=":
            if character == ",":
                parts.append(answer[start:at])
            start = at + 1
    return ";".join(parts) if depth == 0 else answer


def unstyled(answer: str) -> str:
    r"""Return the answer without font commands and spaces: ``\text{no solution}`` as ``nosolution``."""
    return _SPACES.sub("", _FONTS.sub(r"\1", answer))


def has_numbers_side_by_side(answer: str) -> bool:
    r"""Whether two numbers have only white space between them: ``3 4``, ``1 000``; not ``\log_2 3``."""
    return bool(_SIDE_BY_SIDE.search(_ONE_DIGIT.sub("{}", answer)))


def same_text(text: str, other: str) -> bool:
    r"""Whether two answers are the same text without fonts and spaces, or the same word with another initial
    case: ``8\text{:}30`` and ``8:30``, ``\text{Yes}`` and ``yes``."""
    if has_numbers_side_by_side(text) != has_numbers_side_by_side(other):
        return False  # 3 4 is not 34
    left, right = unstyled(text), unstyled(other)
    if left == right:
        return bool(left)
    return left.lower() == right.lower() and all(map(_ANY_WORD.fullmatch, (left, right)))


def base_of(answer: str) -> int | str | None:
    r"""Return the base that a number names (``1010_{2}``, ``11_\text{five}``), or None."""
    number = _IN_A_BASE.fullmatch(unstyled(answer))
    if number is None:
        return None
    return int(number[1]) if number[1].isdigit() else _BASES.get(number[1], number[1])


def moduli(answer: str) -> list[str]:
    r"""Return the moduli in an answer: ``7`` in ``x \equiv 5 \mod 7``."""
    return _MODULUS.findall(answer)


def number_sides(answer: str) -> list[list[str]]:
    """Return, for each equation in an answer, the sides that contain only numbers and operations."""
    equations = [part.split("=") for part in _LIST_COMMA.split(answer)]
    return [[side for side in sides if _NUMBER_SIDE.fullmatch(side)] for sides in equations if len(sides) > 1]


def brackets(answer: str) -> str:
    r"""Return the brackets around a whole answer: ``{`` for ``\{...\}``, ``(``, or an empty string."""
    text = _SIZES.sub("", answer).replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").strip()
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "{"
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return "(" if character == ")" and at == len(text) - 1 else ""
    return ""
