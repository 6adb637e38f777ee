"""Second try of failed tests: ``make test-again``, which ``.ci/run`` calls after a tier with failures.

They run one after the other, without other tests beside them; exit code 0 if all pass now. Nothing is tried
again where the run before did not end by itself (an interrupt, an internal error, no tests), since tests that
never ran would count as passed; nor where more than ``MOST`` failed, which is not a fault of the load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".pytest_cache/v"
"""Folder of pytest's cache, in the root of the checkout."""

MOST = 10
"""Most failed tests that are tried again."""

_EXIT = "session/exit_code"


def keep_exit_code(config: pytest.Config, code: int | None) -> None:
    """Keep the exit code of a session for ``main``: None at its start, for one that is killed."""
    if getattr(config, "cache", None) is not None and not hasattr(config, "workerinput"):
        config.cache.set(_EXIT, code)


def check_last_session(cache: Path = CACHE) -> None:
    """SystemExit if the failed tests of the last session are not to be tried again."""
    path = cache / _EXIT
    code = json.loads(path.read_text()) if path.exists() else None
    if code != pytest.ExitCode.TESTS_FAILED:
        raise SystemExit(f"nothing is tried again: the tests before ended with {code}, not with failed tests")
    if (failed := len(json.loads((cache / "cache/lastfailed").read_text()))) > MOST:
        raise SystemExit(f"nothing is tried again: {failed} tests failed, and at most {MOST} are")


def main(flags: list[str]) -> int:
    """Run the failed tests again, each by its name; pytest's exit code."""
    check_last_session()
    again = ["--last-failed", "--last-failed-no-failures=none", "-n", "0", "-v"]
    again.append("--continue-on-collection-errors")
    return subprocess.call([sys.executable, "-m", "pytest", *again, *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
