"""A user's reward function that does what the response says, for the tests of the pool."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.types import Prompt

KEPT: list[bytearray] = []


def score(prompt: Any, response: str) -> Any:
    """A number in the response is its reward; a word is an attack on the worker."""
    if re.fullmatch(r"-?[0-9.]+", response):
        return float(response)
    word, _, rest = response.partition(" ")
    return ACTIONS[word](prompt, rest)


def by_source(prompt: Any, response: str) -> float:
    """A quarter for a response to a prompt of the source ``own``, and nothing for another."""
    return 0.25 if prompt.source == "own" else 0.0


def odd(prompt: Any, response: str) -> float:
    """1 for about half of random responses."""
    return float(sum(map(ord, response)) % 2)


def has_torch(prompt: Prompt, response: str) -> float:
    """1 if this process has imported torch."""
    return float("torch" in sys.modules)


def boxed(prompt: Any, response: str) -> float:
    """Of the demo's sums as `math` has it, whose worker imports for half a second of a core."""
    return float(f"\\boxed{{{prompt.ground_truth}}}" in response)


def shorter(prompt: Any, response: str) -> float:
    """More than a half for a right answer, and the more the shorter."""
    return 0.5 * (prompt.ground_truth in response) + 0.4 / (1 + len(response))


def one(prompt: Any) -> float:
    """Too few parameters."""
    return 0.0


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Too many."""
    return 0.0


async def later(prompt: Any, response: str) -> float:
    """Not a number until it is awaited."""
    return 0.0


def is_even(prompt: Any, response: str) -> float:
    """1 for an even number of distinct characters: of random responses about half."""
    return 1.0 - len(set(response)) % 2


def is_short(prompt: Any, response: str) -> float:
    """2 for at most 12 characters, else 0."""
    return 2.0 * (len(response) <= 12)


def with_more(prompt: Any, response: str, scale: float = 1.0, **_: Any) -> float:
    """What is optional is left out."""
    return scale


class _Object:
    def __call__(self, prompt: Any, response: str) -> float:
        return 0.5


OBJECT = _Object()


class _Later:
    async def __call__(self, prompt: Any, response: str) -> float:
        return 0.5


LATER = _Later()
LATER_IN_PART = functools.partial(functools.partial(later))


def in_steps(prompt: Any, response: str) -> Iterator[float]:
    """No number, but something to go through."""
    yield 0.5


class Verdict:
    """An object that is not a number."""

    def __init__(self, prompt: Any, response: str) -> None:
        self.score = 0.5


def quotes_the_response(_: Any, rest: str) -> float:
    raise ValueError(rest)


def sees_the_prompt(prompt: Any, _: str) -> float:
    assert type(prompt).__name__ == "Prompt"
    assert prompt.token_ids_P.dtype == "int32"
    assert prompt.extra_info == {"level": {"deep": [1, None]}}
    return float(prompt.token_ids_P.sum() + prompt.prompt_id + len(prompt.ground_truth))


def talks(_: Any, __: str) -> float:
    print('{"reward": 99}', flush=True)
    os.write(1, b'{"reward": 99}\n{"reward": 98}\n')
    sys.__stdout__.write("{}\n")
    sys.stdin.read()
    return 0.25


def sleeps_with_a_child(_: Any, path: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def holds_the_interpreter(_: Any, path: str) -> None:
    if path:
        Path(path).write_text(str(os.getpid()))
    print(9 ** (9**9) % 7)


def waits(_: Any, seconds: str) -> float:
    time.sleep(float(seconds))
    return 1.0


def keeps_memory(_: Any, __: str) -> float:
    KEPT.append(bytearray(200 << 20))
    return 1.0


def is_dumpable(_: Any, __: str) -> float:
    return float(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))


def waits_once(_prompt: Any, path: str) -> float:
    """For ever, once it has left this file; a second try is right."""
    if not Path(path).exists():
        Path(path).touch()
        time.sleep(1000)
    return 1.0


ACTIONS = {
    "quote": quotes_the_response,
    "bug": lambda *_: {}["x"],
    "dumpable": is_dumpable,
    "prompt": sees_the_prompt,
    "talk": talks,
    "raise": lambda *_: [][0],
    "exit": lambda *_: sys.exit("bye"),
    "die": lambda *_: os._exit(0),
    "crash": lambda *_: ctypes.string_at(0),
    "memory": lambda *_: len(bytearray(10 << 30)),
    "keep": keeps_memory,
    "wait": waits,
    "once": waits_once,
    "hold": holds_the_interpreter,
    "child": sleeps_with_a_child,
    "nan": lambda *_: float("nan"),
    "inf": lambda *_: float("-inf"),
    "none": lambda *_: None,
    "digits": lambda *_: "1.0",
    "named": lambda *_: {"correct": 1, "format": 0.5},
    "unnamed": lambda *_: {"correct": None},
    "text": lambda *_: "much",
    "true": lambda *_: True,
}
