"""Text normalization: normal forms of questions, to find duplicates and overlaps, and of short answers.

``tokens`` returns a question's normal form, ``key`` the hash of it, ``words`` the words and numbers in it,
``ngrams`` a list's n-grams; ``answer_text`` the normal form of an answer, also for majority votes. Normal
forms drop case, spaces, dollar signs, LaTeX spacing and final punctuation; they keep symbols and numbers.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:!\s]|\\[()\[\]]|[$~]")
_SAME = re.compile(r"\\[dt](?=frac|binom)")
_TOKEN = re.compile(r"[\u3400-\u9fff]|\\?[^\W\d_\u3400-\u9fff]+|\d+|\S")
"""Token: a character of a script without spaces, a word or command, a number, or a symbol."""


def tokens(question: str) -> list[str]:
    """Return a question's normal form: its words, commands, numbers and symbols, in order."""
    text = _SPACING.sub(" ", unicodedata.normalize("NFKC", question).lower())
    words = _TOKEN.findall(_SAME.sub(lambda _: "\\", text))
    while words and words[-1] in ".?!,;:":
        words.pop()
    return words


def words(question: str) -> list[str]:
    """Return a question's words and numbers, without typesetting."""
    bare = (token.lstrip("\\") for token in tokens(question))
    return [word for word in bare if word and word.isalnum()]


def key(question: str) -> bytes:
    """Return the hash of a question's normal form, 16 bytes."""
    return hashlib.sha256(" ".join(tokens(question)).encode()).digest()[:16]


def answer_text(answer: str) -> str:
    """Return an answer's normal form: its tokens joined without spaces, integers without leading zeros."""
    text = "".join(tokens(answer))
    digits = text.removeprefix("+")
    whole = digits.isascii() and digits.removeprefix("-").isdecimal() and len(digits) < 100
    return str(int(digits)) if whole else text


def ngrams(sequence: list[str], size: int) -> set[str]:
    """Return the n-grams of ``sequence``: all runs of ``size`` words; empty if there are fewer."""
    return {" ".join(sequence[at : at + size]) for at in range(len(sequence) - size + 1)}
