r"""Splitter of math answers into mathematics and words (units, nouns, other text); pure text functions.

``reading(answer)`` returns the ``Reading``, and ``counterparts(truth, answer)`` the pairs of mathematics to
compare, or None if the words differ. math-verify would drop units at the end of an answer, even where they
are variables (the ``h`` of ``\pi r^2 h``), and multiply other words by their numbers. So it gets only the
mathematics (math_verify_compare.py); words are compared as text.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from bapo_megatron.reward.answer_text import KINDS, is_unit, unstyled

_UNIT_LINES = """
mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inche
ft foot feet, yd yard, mi mile, g gram, kg kilogram kilo, mg milligram, lb pound, oz ounce, s sec second
min minute, h hr hour, day, week, month, year yr, ml milliliter millilitre, l liter litre, mi/h mph
km/h kmh kmph kph, degree deg, radian rad, dollar usd, cent, euro eur, rupee rs, newton, joule, watt, volt
pa pascal, hz hertz, mol mole, kelvin, celsius c, fahrenheit f, unit, gallon gal, acre, hectare ha
th st nd rd
"""
_UNITS = [line.split() for line in _UNIT_LINES.strip().replace("\n", ",").split(",")]
_SPELLINGS = {spelling: names[0] for names in _UNITS for spelling in names}
_POWERS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}

_CHANGING = """
hundred thousand million billion trillion bn mn mil thou k dozen score half halve third quarter fourth fifth
sixth seventh eighth ninth tenth twelfth hundredth thousandth percent percentage pct double twice time
squared cubed factorial plus minus negative positive root pi infinity over les less more least most fewer
greater larger smaller under above below beyond not no non never except excluding or and to through between
if when where for unles unless otherwise mod modulo remainder base out off am pm noon midnight north south
east west northeast northwest southeast southwest bc ad bce ce odd even maybe perhap either neither only
inclusive exclusive repeating
"""
_CHANGES = frozenset(_CHANGING.split())
"""Words, in the singular, that change a number. An answer may omit all others: units and counted things."""

_FONT = re.compile(
    r"\\(text(?:bf|it|rm|sf|tt|normal)?|mbox|math(?:rm|bf|it|sf|tt)|operatorname|boldsymbol)\s{0,9}\{([^{}]*)\}"
)
_PLAIN_UNIT = "|".join(
    sorted((f"{one}s?" for one in _SPELLINGS if len(one) > 1 and one != "mg" and "/" not in one), key=len)[
        ::-1
    ]
)
_TOUCHING = re.compile(r"(?:[ckm]m|kg)(?![a-z])")
"""Units that may follow a number without a space; others could be variables: ``2mg``."""
_POWER = r"(?:\^\{?[23]\}?)?"
_TOKEN = re.compile(
    _FONT.pattern
    + rf"|(?<![A-Za-z\\])((?:{_PLAIN_UNIT}){_POWER}(?:\s?(?:/|per\s)\s?(?:{_PLAIN_UNIT}|[hsgmlL]){_POWER})?"
    + rf"|m/s{_POWER})(?![A-Za-z(])"
    + r"|(?<![A-Za-z\\])([ap]\.\s?m\.?|[AP]\.\s?M\.?|[AaPp][Mm])(?![A-Za-z])"
    + r"|(?<![A-Za-z0-9\\})_^])([A-Za-z]?[a-z]+|[A-Z]{3,})(?![A-Za-z0-9({_^])"
    + r"|\\(?:[A-Za-z]+|.)|[A-Za-z]+|.",
    re.DOTALL,
)
"""Text in a font, a unit, a time of day, a lone word, a command, letters, or any other character."""
_ORDINAL = re.compile(r"\s*[0-9]*(?:1st|2nd|3rd|1[123]th|[04-9]th)")
_BEHIND_A_NUMBER = re.compile(r"(?:[0-9})]|\\circ|\\pi|\\%)(?:\s|\\[ ,;:!]|~){0,9}\Z")
_CAPITALS = re.compile(r"(?<![A-Za-z.])[KM](?![A-Za-z])")
_UNIT_LETTER = re.compile(r"([0-9][0-9.,]{0,40})(?:\s|\\[ ,;:]|~){1,9}[mgshlLNJWVAK](?:\^\{?[23]\}?)?")
_COMMAND_BEFORE = re.compile(r"\\[A-Za-z]{1,20}\s{0,9}\Z")
_RATE = re.compile(r"[\s(]{0,9}[A-Za-z]{1,4}\s?/\s?[A-Za-z]{1,4}[\s)]{0,9}")
"""Unit of a rate, with or without brackets: ``(m/h)``."""
_EXPONENT = re.compile(r"\s{0,9}\^\{?([23])\}?")
_BLANK = re.compile(r"(?:\s|\\[ ,;:!]|~|[,;&]|\.(?![0-9])|\\(?:quad|qquad)(?![a-z]))*")
_VALUE = re.compile(r"[0-9]|\\pi|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_SEVERAL = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}|[0-9]\s{0,9}[A-Za-z]{1,9}\s{0,9}[0-9]")
"""Letters between numbers (``1 h 30``), or further words."""
_NO_VALUE = re.compile(r"(?:\s|\\[ ,;:!{}]|[~,;.&(){}\[\]])*")
_FUNCTION = re.compile(
    r"(?:a(?:rc)?)?(?:sin|cos|tan|cot|sec|csc)|log|ln|exp|sqrt|frac|pi|theta|alpha|beta|gamma|inf|max|min|gcd|lcm|mod|det"
)
_LETTERS = re.compile(r"[A-Za-z][A-Za-z\s,.'&-]*")
_RUN = re.compile(r"[A-Za-z]+")
_LITTLE = {"and", "or", "to", "by", "of", "in", "at", "is", "on", "if", "no", "vs", "for", "per", "out"}
_CONNECTOR = re.compile(r"(?:\s|\\ |~|,)*(?:and|or)(?:\s|\\ |~)*")
_CURRENCY = re.compile(r"\s*(?:\\?\$|USD(?![A-Za-z]))\s*")
_NAMED = re.compile(r"\\?[A-Za-z]+(?:\{[A-Za-z]\})?(?:_\{?\w+\}?)?'{0,3}[(\[][^()\[\]]*[)\]]")

_FRAGMENT = re.compile(r"(?=.*[0-9()\[\]])[\s0-9.,;:()\[\]{}\\+-]*", re.DOTALL)
_LITERAL = re.compile(r"[0-9]+(?:[-./][0-9]+){2,}|[0-9]+(?::[0-9]+){2,}|0[xXbB][0-9A-Fa-f]+")
"""A date, address, version, three-part ratio or hexadecimal number: text, not operations."""
_SEXAGESIMAL = re.compile(r"[0-9}](?:'|\"|\^\{?\\prime)|\\circ[0-9]")
"""Feet and inches, or degrees and minutes."""
_RANGE = re.compile(r"[0-9]+-[0-9]+")
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_MARKS = re.compile(r"'|\"|\\prime(?![a-z])|\\[lc]?dots[bcm]?(?![a-z])|\.\.\.|\\\\|&|\\\{")


@dataclass(frozen=True)
class Reading:
    """Answer split into mathematics and words: ``parts[0] words[0] parts[1] ... parts[-1]``."""

    parts: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def is_text(self) -> bool:
        """Whether the answer consists of words, brackets and punctuation."""
        return bool(self.words) and all(map(_NO_VALUE.fullmatch, self.parts))

    @property
    def items(self) -> Counter[str]:
        """Items of an ``is_text`` answer, split at commas, semicolons and ``and``, in any order."""
        items = re.split(r"[,;&]|\band\b", ", ".join(self.words))
        return Counter(item.strip() for item in items if item.strip())

    @property
    def measured(self) -> str | None:
        """Value before a single unit or noun that may be omitted, or None."""
        value = self.parts[0]
        if len(self.words) != 1 or self.parts[1] or not _VALUE.search(value) or _SEVERAL.search(value):
            return None
        compass = {"n", "s", "h", "e", "w"} if value.endswith((r"\circ", r"\circ}")) else set()
        return None if _CHANGES.union(compass).intersection(re.split(r"[ /]", self.words[0])) else value


def reading(answer: str) -> Reading:
    """Split a ``spelled`` answer into mathematics and words."""
    text, currency = answer, _CURRENCY.match(answer)
    if currency:
        text = text[currency.end() :]
    text = _FONT.sub(_bare, text)
    is_text = bool(_LETTERS.fullmatch(text)) and any(_is_word(run, 3) for run in _RUN.findall(text))
    pieces: list[tuple[bool, str]] = []  # (is a word, text)
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] == "{") - (token[0] == "}")
        before = "" if not pieces or pieces[-1][0] else pieces[-1][1]
        word = None
        if is_text and token[0][0].isalpha():
            word = token[0]
        elif depth == 0 and not before.rstrip().endswith(("_", "^")):
            word = _word(token, before, bool(pieces) and (pieces[-1][0] or before.strip() in ("/", r"\cdot")))
        is_word, piece = word is not None, token[0] if word is None else word
        if pieces and not is_word and not pieces[-1][0]:
            pieces[-1] = (False, before + piece)
        else:
            pieces.append((is_word, piece))
    return _grouped(pieces, "dollar" if currency else "")


def counterparts(truth: Reading, answer: Reading) -> list[tuple[str, str]] | None:
    """Return the pairs of mathematics to compare, or None if the words differ. One side may omit its unit."""
    if truth.words == answer.words:
        return list(zip(truth.parts, answer.parts, strict=True))
    values = [side.measured if side.words else side.parts[0] for side in (truth, answer)]
    if (truth.words and answer.words) or None in values:
        return None
    return [(str(values[0]), str(values[1]))]


def _bare(font: re.Match[str]) -> str:
    """Return text with digits, or single letters, without its font command, and other text unchanged."""
    inside = font[2]
    has_word = any(len(run) > 1 for run in _RUN.findall(inside)) or _RATE.fullmatch(inside)
    if any(map(str.isdigit, inside)) or (not has_word and len(_RUN.findall(inside)) != 1):
        return f" {inside} "
    return font[0]


def _word(token: re.Match[str], before: str, follows_a_word: bool) -> str | None:
    font, inside, unit, time, plain = token.groups()
    behind_a_number = follows_a_word or bool(_BEHIND_A_NUMBER.search(before[-40:]))
    if font:
        return _word_in_font(token, font, inside, behind_a_number)
    touches = (
        before[-1:].isalnum()
        and not _TOUCHING.match(unit or "")
        and not _ORDINAL.fullmatch(f"{before}{unit}")
    )
    if unit and behind_a_number and (follows_a_word or not touches):
        return unit
    if time and behind_a_number:
        return time
    lone = plain or unit or time
    if lone and lone in _LITTLE:
        return lone
    is_label = lone and lone.isupper() and _COMMAND_BEFORE.search(before[-40:])  # \\angle ABC
    return lone if lone and _is_word(lone, 4) and not is_label else None


def _word_in_font(token: re.Match[str], font: str, inside: str, behind_a_number: bool) -> str | None:
    name = inside.strip(" ()\\,;:.~")
    if len(name) < 2:
        return name if behind_a_number and name.isalpha() and name not in "eidxyzP" else None
    if name in KINDS and not is_unit(token, name):
        return None
    is_name = font.startswith("math") or font in ("operatorname", "boldsymbol")
    return None if is_name and not behind_a_number and (name.isupper() or len(name) < 3) else inside


def _is_word(run: str, least: int) -> bool:
    """Whether letters form a word, not a product of variables (``abc``, ``mgh``, ``sinx``)."""
    if run.isupper():
        return len(run) > 2
    lower = run.lower()
    ascends = all(letter < other for letter, other in pairwise(lower))
    return (
        len(run) >= least and any(c in "aeiouy" for c in lower) and not ascends and not _FUNCTION.match(lower)
    )


def _grouped(pieces: list[tuple[bool, str]], currency: str) -> Reading:
    """Merge adjacent words. ``and`` and ``or`` between mathematics belong to the mathematics."""
    parts, words = [""], [""]
    for at, (is_word, piece) in enumerate(pieces):
        beside = [pieces[n][1] if 0 <= n < len(pieces) and not pieces[n][0] else "" for n in (at - 1, at + 1)]
        if is_word and _CONNECTOR.fullmatch(piece) and not any(map(_BLANK.fullmatch, beside)):
            is_word, piece = False, f" {piece.strip()} "
        if is_word:
            if words[-1] and _joins(parts[-1]):
                words[-1] += f" {parts.pop().strip()} {piece}"
            else:
                words.append(piece)
            parts.append("")
            continue
        parts[-1] += piece
        if words[-1] and len(parts) > 1 and (power := _EXPONENT.match(parts[-1])):
            words[-1] += f"^{power[1]}"
            parts[-1] = parts[-1][power.end() :]
    if currency:
        _add(parts, words, currency)
    return Reading(tuple(map(_stripped, parts)), tuple(map(canonical, words[1:])))


def _joins(part: str) -> bool:
    return part.strip() in ("", "/", ".", "-") or (
        part.strip() != "," and not _stripped(part) and "," not in part
    )


def _add(parts: list[str], words: list[str], currency: str) -> None:
    """Append the currency in front of an answer to the words behind it."""
    if _stripped(parts[-1]) or not words[-1]:
        words.append(currency)
        parts.append("")
    else:
        words[-1] += f" {currency}"


def _stripped(part: str) -> str:
    start = _BLANK.match(part)
    text = part[start.end() if start else 0 :]
    while text and (text[-1].isspace() or text[-1] in "~,;"):
        text = text[:-2] if text[-2:] in (r"\,", r"\;") else text[:-1]
        if text.endswith("\\") and not text.endswith("\\\\"):
            text = text[:-1]
    return text


def canonical(words: str) -> str:
    """Return words in canonical spelling: lower case, singular, units as ``m^2/s``."""
    text = re.sub(r"\\[ ,;:!]|~", " ", _CAPITALS.sub(_capital, words).lower()).replace(",", " , ")
    text = re.sub(r"[.'\"`]", "", text).replace("/", " / ").replace(" per ", " / ")
    units: list[str] = []
    power = ""
    for word in text.split():
        name, _, exponent = word.partition("^")
        name = _singular(name)
        if name in _POWERS:
            if not name.endswith("ed"):
                power = _POWERS[name]
                continue
            if units:
                units[-1] += _POWERS[name]
                continue
        units.append(_SPELLINGS.get(name, name) + (f"^{exponent}" if exponent else power))
        power = ""
    if len(units) > 1 and units[-1] in ("celsius", "fahrenheit") and units[-2] == "degree":
        del units[-2]
    return " ".join(units).replace(" / ", "/").replace(" ,", ",").strip(", ")


def _capital(letter: re.Match[str]) -> str:
    return "kelvin" if letter[0] == "K" else "million"


def _singular(word: str) -> str:
    if word in _SPELLINGS or word.endswith("ss") or (len(word) < 4 and word[:-1] not in _SPELLINGS):
        return word
    return word.removesuffix("s")


def without_unit_letter(answer: str) -> str:
    """Return the answer without a one-letter unit (``5 m``), which could be a variable."""
    match = _UNIT_LETTER.fullmatch(answer)
    return match[1] if match else answer


def is_fragment(part: str) -> bool:
    """Whether a word cuts the mathematics within brackets (``(3``), so that it is compared as text."""
    return bool(_FRAGMENT.fullmatch(part))


def split_name(answer: str) -> tuple[str, str]:
    r"""Return name and value of ``f(2) = 3`` or ``\text{Area} = 3``; other answers have an empty name. Names
    are compared as text, since math-verify treats ``f(2)`` like ``f(3)``."""
    depth, at = 0, -1
    for place, character in enumerate(answer):
        depth += (character in "{([") - (character in "})]")
        if character == "=" and depth == 0:
            at = place
            break
    name, rest = answer[: max(at, 0)], answer[at + 1 :]
    value = rest.rpartition("=")[2].strip()
    if at < 0 or not value or "," in rest or name.endswith(("<", ">", "!", "\\")):
        return "", answer
    said = reading(name)
    is_named = _NAMED.fullmatch(unstyled(name)) or said.is_text or (said.measured is not None and said.words)
    return (unstyled(name).lower(), value) if is_named else ("", answer)


def is_literal(answer: str) -> bool:
    """Whether digits and signs are text (a date, an address, an angle in minutes), not an operation."""
    text = unstyled(answer)
    return bool(_LITERAL.fullmatch(text) or _SEXAGESIMAL.search(text))


def are_times(truth: str, answer: str) -> bool:
    """Whether the truth is a time of day (``8:30``), or both may be one; ``2:25`` may also be a ratio."""
    time, other = (_TIME.fullmatch(unstyled(text)) for text in (truth, answer))
    if time is None:
        return False
    return bool(other) or "0" in (time[1][0], time[2][0]) or gcd(int(time[1]), int(time[2])) > 1


def is_range(answer: str) -> bool:
    """Whether the answer is two integers with a dash: ``3-5``."""
    return bool(_RANGE.fullmatch(unstyled(answer)))


def marks(answer: str) -> Counter[str]:
    """Count the signs that math-verify drops: primes, dots, line ends, inner braces of sets."""
    counts = Counter(_MARKS.findall(answer))
    if r"\begin" in answer:  # their number follows from the matrix size
        del counts["\\\\"], counts["&"]
    if counts[r"\{"] < 2 or r"\cup" in answer:
        del counts[r"\{"]
    return counts
