"""Hooks of every interpreter whose PYTHONPATH has this folder: a deleted log of a journal keeps a name,
``python -m bapo_megatron.cli`` may be run by the fork server, and processes may keep their priority.

Before a process deletes a log, it is linked into the folder that ``BAPO_TEST_KEPT_LOGS`` names. The fork
server imports this module, too. Used by ``raw_journal.keeping_logs``, ``forked_commands.forking`` and
``processes.keep_priority``.
"""

import os
import sys
from contextlib import suppress
from typing import Any

VARIABLE = "BAPO_TEST_KEPT_LOGS"
FORKS = "BAPO_TEST_FORKS"
PRIORITY = "BAPO_TEST_KEEPS_PRIORITY"


def _keep(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "os.remove" or VARIABLE not in os.environ:
        return
    name = os.path.basename(path := os.fsdecode(arguments[0]))
    if name.startswith("segments-") and name.endswith(".log"):
        with suppress(FileExistsError):
            os.link(path, os.path.join(os.environ[VARIABLE], name))


sys.addaudithook(_keep)

if PRIORITY in os.environ:
    os.setpriority = lambda *_: None

if FORKS in os.environ and sys.orig_argv[1:3] == ["-m", "bapo_megatron.cli"]:
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../../.."))
    from tests.support.forked_commands import start_bapo

    code = start_bapo(*sys.orig_argv[3:], directory=os.getcwd(), log=1).wait()
    os._exit(code % 256)
