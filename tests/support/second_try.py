"""Second try of failed tests: ``make test-again``, which ``.ci/run`` calls after a tier with failures.

They run one after the other, without other tests beside them. Exit code 0 if all pass now; each is then named
as one that passed at its second try. Nothing is tried again where the run before did not end by itself (an
interrupt, an internal error, no tests), since tests that never ran would count as passed; nor where more than
``MOST`` failed, which is not a fault of the load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(__file__).parents[2] / ".pytest_cache/v"
"""Folder of pytest's cache, in the root of the checkout."""

MOST = 10
"""Most failed tests that are tried again."""

_EXIT = "session/exit_code"
_FAILED = "cache/lastfailed"


def keep_exit_code(config: pytest.Config, code: int) -> None:
    """Keep the exit code of a session for ``main``; conftest.py calls it at the end of the session."""
    if getattr(config, "cache", None) is not None and not hasattr(config, "workerinput"):
        config.cache.set(_EXIT, int(code))


def forget_exit_code(config: pytest.Config) -> None:
    """Forget that of an earlier session, at a session's start: one that is killed leaves none."""
    if getattr(config, "cache", None) is not None and not hasattr(config, "workerinput"):
        config.cache.set(_EXIT, None)


def failed_tests(cache: Path = CACHE) -> list[str]:
    """Node ids that failed in the last session. SystemExit if they are not to be tried again."""
    code = _read(cache / _EXIT)
    if code != pytest.ExitCode.TESTS_FAILED:
        raise SystemExit(f"nothing is tried again: the tests before ended with {code}, not with failed tests")
    failed: dict[str, bool] = _read(cache / _FAILED) or {}
    if not 0 < len(failed) <= MOST:
        raise SystemExit(
            f"nothing is tried again: {len(failed)} tests failed, at most {MOST} are tried again"
        )
    return list(failed)


def main(flags: list[str]) -> int:
    """Run the failed tests again, and say which passed; pytest's exit code."""
    names = failed_tests()
    print("second try, one after the other:", *names, sep="\n  ", flush=True)
    code = subprocess.call(
        [sys.executable, "-m", "pytest", "-n", "0", "-v", "--continue-on-collection-errors", *names, *flags]
    )
    if code == 0:
        print("passed at the second try (a fault of the test, or of the load):", *names, sep="\n  ")
    return code


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
