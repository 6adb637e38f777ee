"""Text normalization: the normal form of questions for deduplication and decontamination.

It drops case, spaces, dollar signs, LaTeX's spacing and final punctuation; symbols and numbers stay.
Evaluations compare the answers of a majority vote by it. Pure functions.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:!\s]|\\[()\[\]]|[$~]")
_SAME = re.compile(r"\\[dt](?=frac|binom)")
_TOKEN = re.compile(r"[\u3400-\u9fff]|\\?[^\W\d_\u3400-\u9fff]+|\d+|\S")
"""A token: a character of a script without spaces, a word or command, a number, or a symbol."""

_NUMBER = r"\d+(?: \. \d+)?"
_COMMUTATIVE = re.compile(
    r"(?<![-+*/^\u00d7\u00f7\u00b7] )(?<!\\times )(?<!\\cdot )(?<!\\div )(?<!\d \. )(?<![\w\\])"
    rf"{_NUMBER} (?P<sign>[+*\u00d7\u00b7]|\\times|\\cdot) {_NUMBER}(?: (?P=sign) {_NUMBER})*"
    r"(?!\d)(?! (?:[-+*/^\u00d7\u00f7\u00b7!(%]|[a-z](?: |$)|\. \d|\\(?:times|cdot|div)))"
)
"""In a normal form: numbers with one commutative sign between them, and no other sign before or behind,
nor a letter behind: ``3 + 4 x`` is another sum than ``4 + 3 x``."""


def tokens(question: str) -> list[str]:
    """Normal form of a question: its words, commands, numbers and symbols, in order."""
    text = _SPACING.sub(" ", unicodedata.normalize("NFKC", question).lower())
    words = _TOKEN.findall(_SAME.sub(lambda _: "\\", text))
    while words and words[-1] in ".?!,;:":
        words.pop()
    return words


def words(question: str) -> list[str]:
    """Words and numbers of a question, without its typesetting."""
    bare = (token.lstrip("\\") for token in tokens(question))
    return [word for word in bare if word and word.isalnum()]


def key(question: str) -> bytes:
    """Hash of a question's normal form, 16 bytes."""
    return _hash(" ".join(tokens(question)))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def commuted_key(question: str) -> bytes:
    """``key`` with the numbers of plain sums and products in order: ``3 + 4`` and ``4 + 3`` are one."""
    return _hash(_COMMUTATIVE.sub(_in_order, " ".join(tokens(question))))


def _in_order(run: re.Match[str]) -> str:
    sign = f" {run['sign']} "
    return sign.join(sorted(run[0].split(sign), key=lambda number: (float(number.replace(" ", "")), number)))


def answer_text(answer: str) -> str:
    """Normal form of an answer: no typesetting; whole numbers without leading zeros."""
    text = "".join(tokens(answer))
    digits = text.removeprefix("+")
    whole = digits.isascii() and digits.removeprefix("-").isdecimal() and len(digits) < 100
    return str(int(digits)) if whole else text


def ngrams(sequence: list[str], size: int) -> set[str]:
    """N-grams of ``sequence``: all runs of ``size`` words; empty if there are fewer."""
    return {" ".join(sequence[at : at + size]) for at in range(len(sequence) - size + 1)}
