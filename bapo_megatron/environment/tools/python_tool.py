"""Python tool: an environment that runs the code in the model's turns and returns its output.

    environment.function = "bapo_megatron.environment.tools.python_tool:PythonTool"
    environment.settings = {"format": "fenced"}

A call sees the definitions of earlier calls, as in a notebook. Nothing runs between calls: each call silently
repeats the earlier ones, except those that timed out or ended their interpreter, in a fresh sandbox, as the
code reward uses (docs/rewards.md#the-sandbox). So an episode costs no process while the model samples, and
survives a kill. Repeated draws are seeded (``random``, numpy's global generator, set order); clock readings
and draws from the system, such as numpy's ``default_rng()``, differ. A turn without a call is the answer: it
ends the episode, and ``reward.function`` judges it. A call costs a sandbox (about 20 per second and core:
benchmarks/results/settled.md) plus the time of earlier calls.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from bapo_megatron.environment import Environment, Reply, Task, Turn
from bapo_megatron.environment.settings import PythonSettings
from bapo_megatron.environment.tools.calls import answer_part, arguments, results
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.code import last_code_block
from bapo_megatron.reward.sandbox.isolation import be_untraceable
from bapo_megatron.reward.sandbox.sandbox import FIX, Ended, Sandbox, sandbox_notes

WELL, BADLY = 100, 101
"""Exit codes of a call that completed, and of one that raised, after a random mark in the output. Without
both, the call itself ended its interpreter; replaying it would end all later calls."""

RUNNER = (
    r"""
import ast, contextlib, io, json, linecache, os, random, sys, traceback, types

def run(code, space, shows):
    tree = ast.parse(code, "<call>")
    last = tree.body.pop() if shows and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<call>", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<call>", "eval"), space)
        if value is not None:
            print(repr(value))

def run_before(codes, space):
    # Silently: also what is written to the descriptor goes where stderr goes, nowhere.
    output, shown = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
            run(code, space, False)
    with contextlib.suppress(ValueError):
        output.flush()
    os.dup2(shown, 1)
    os.close(shown)

def main(write=os.write):
    session = json.load(sys.stdin)
    mark, output = session["mark"].encode(), os.dup(1)  # the call may close the descriptor
    random.seed(0)  # what a call has drawn, it must draw again
    users = "numpy", "pandas", "scipy", "sklearn"  # of numpy's generator
    if any(name in code for code in (*session["before"], session["code"]) for name in users):
        with contextlib.suppress(ImportError):
            import numpy
            numpy.random.seed(0)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    space = module.__dict__
    if session["before"]:
        run_before(session["before"], space)
    code = session["code"]
    linecache.cache["<call>"] = (len(code), None, (code + "\n").splitlines(True), "<call>")
    end = WELL
    try:
        run(code, space, True)
    except BaseException as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == "<call>"]
        lines = [*traceback.format_list(frames[-3:]), *traceback.format_exception_only(error)]
        print("".join(lines), end="")
        end = BADLY
    write(output, mark)
    sys.exit(end)

WELL, BADLY = """
    + f"{WELL}, {BADLY}"
    + r"""
main()
"""
)
"""Program in the sandbox: silently runs the earlier calls, then the call, and prints its output.

Prints the value of a final expression, and the traceback of an error. Names live in ``__main__``, as in a
script: pickle and dataclasses look there.
"""

TURN_LIMITS = 4
"""Time limit of all calls in a turn, as a multiple of ``limit_s``. Otherwise many hanging calls would exceed
``environment.step_limit_s`` and fail the response, instead of giving the model an error."""
_KEPT = "nothing of this call is kept"


class PythonTool(Environment):
    """Episode with a Python session: ``step`` returns the output of a turn's calls. ``step`` is a plain
    function, so a worker runs at most 32 at a time. Raises ConfigError for missing walls of the sandbox."""

    resume = "restore"
    settings_type = PythonSettings

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self._settings = PythonSettings(**settings)
        self._codes: list[str] = []
        """Code of all calls so far, including those not kept."""
        self._lost: list[int] = []
        """Indices of calls that are not kept: they timed out or ended their interpreter."""
        be_untraceable()  # it holds the dataset's answers
        if not self._settings.allow_weak_sandbox and (notes := _missing_walls()):
            raise ConfigError(
                f"the sandbox of the Python tool lacks walls on this machine: {'; '.join(notes)}. Grant "
                f"namespaces ({FIX}), or set allow_weak_sandbox in environment.settings"
            )

    def step(self, turn: str) -> Reply:
        """Return the output of the turn's calls, one message each. A turn without a call ends the episode."""
        calls = self._calls(turn)
        if not calls:
            return Reply(None, metrics={"calls": 0.0, "call_errors": 0.0}, note=list(self._lost))
        outputs, errors, began = [], 0, time.monotonic()
        for code in calls:
            if isinstance(code, ValueError):
                output, failed = f"error: {code}", True
            elif time.monotonic() - began >= TURN_LIMITS * self._settings.limit_s:
                output, failed = self._left_out(code), True
            else:
                output, failed = self._run(code)
            outputs.append(output)
            errors += failed
        metrics = {"calls": float(len(calls)), "call_errors": float(errors)}
        return Reply(results(outputs), metrics=metrics, note=list(self._lost))

    def restore(self, turns: Sequence[Turn], note: Any) -> None:
        """Restore the session from earlier turns; ``note``: indices of calls that are not kept."""
        calls = [code for turn in turns if turn.kind == "sampled" for code in self._calls(turn.text)]
        self._codes = [code for code in calls if isinstance(code, str)]
        self._lost = list(note)

    def _calls(self, turn: str) -> list[str | ValueError]:
        if self._settings.format == "fenced":
            block = last_code_block(answer_part(turn))
            return [] if block is None else [block]
        return arguments(turn, "python", "code")

    def _run(self, code: str) -> tuple[str, bool]:
        before = [earlier for place, earlier in enumerate(self._codes) if place not in self._lost]
        limit_s, mark = self._settings.limit_s, secrets.token_hex(16)
        with Sandbox(RUNNER, "", self._settings.memory_mb, limit_s, hash_seed=0) as sandbox:
            ended = sandbox.run(json.dumps({"before": before, "code": code, "mark": mark}), limit_s)
        has_ended = ended is not None and mark in ended.output and ended.code in (WELL, BADLY)
        self._codes.append(code)
        if not has_ended:
            self._lost.append(len(self._codes) - 1)
        failed = ended is None or not has_ended or ended.code != WELL
        said = self._said(ended and replace(ended, output=ended.output.replace(mark, "")), has_ended)
        return said, failed

    def _left_out(self, code: str) -> str:
        """Record a call that exceeds its turn's time, and return the error for the model."""
        self._codes.append(code)
        self._lost.append(len(self._codes) - 1)
        return "error: not run: the calls before it in this turn took too long"

    def _said(self, ended: Ended | None, has_ended: bool) -> str:
        if ended is None:
            return f"error: it took longer than {self._settings.limit_s:g} s; {_KEPT}"
        half, output = self._settings.most_characters // 2, ended.output.rstrip("\n")
        if len(output) > 2 * half:
            left_out = len(output) - 2 * half
            output = f"{output[:half]}\n[{left_out} characters]\n{output[-half:]}"
        if has_ended:
            return output
        return f"{output}\nerror: its interpreter ended with {ended.code}; {_KEPT}".lstrip("\n")


@cache
def _missing_walls() -> list[str]:
    return sandbox_notes()
