"""A hook of every interpreter whose PYTHONPATH has this folder: a deleted log of a journal keeps a name.

Before a process deletes one, it is linked into the folder that ``BAPO_TEST_KEPT_LOGS`` names. The fork server
imports this module, too. Used by ``raw_journal.keeping_logs``.
"""

import os
import sys
from contextlib import suppress
from typing import Any

VARIABLE = "BAPO_TEST_KEPT_LOGS"


def _keep(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "os.remove" or VARIABLE not in os.environ:
        return
    name = os.path.basename(path := os.fsdecode(arguments[0]))
    if name.startswith("segments-") and name.endswith(".log"):
        with suppress(FileExistsError):
            os.link(path, os.path.join(os.environ[VARIABLE], name))


sys.addaudithook(_keep)
