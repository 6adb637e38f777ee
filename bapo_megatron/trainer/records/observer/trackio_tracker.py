"""Trackio tracker: one trackio run for all starts of a run directory.

In the observer's process; no other module imports trackio. Used by ``__main__.py``.
"""

from __future__ import annotations

import os
import sqlite3
import time
from typing import Any

from bapo_megatron.trainer.records.observer.state import NOTHING
from bapo_megatron.trainer.records.observer.tracker import TrackedRun

_STORED_S = 60.0
"""Time until a row must be in the database: trackio's thread writes every half second."""


class TrackioTracker:
    """The ``Tracker`` of trackio: a run in a database or, where trackio is set up so, on a server.

    The database is in TRACKIO_DIR, else RUN/trackers/trackio; ``write`` waits until it has the row, and
    raises OSError after a minute. A server's last step is not known (``last_step`` gives None). ``Observer``
    makes and calls it.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        # Trackio finds the run to go on with by its name, which other runs of the folder may have.
        self._run: Any = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:8]}",
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )
        self._is_local = self._run.url is None

    def last_step(self, metric: str) -> int | None:
        if not self._is_local:
            return None
        return max((row["step"] for row in self._values(metric)), default=NOTHING)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)
        if self._is_local:
            self._wait_until_stored(step, next(iter(metrics)))

    def close(self) -> None:
        self._run.finish()

    def _wait_until_stored(self, step: int, metric: str) -> None:
        """Wait until the row is in the database: trackio drops what it cannot store, with a warning alone."""
        deadline = time.monotonic() + _STORED_S
        while not self._values(metric, step=step):
            if time.monotonic() > deadline:
                raise OSError(f"trackio has not stored step {step}: logs/tracker-trackio.log may say why")
            time.sleep(0.05)

    def _values(self, metric: str, **where: int) -> list[dict[str, Any]]:
        run = self._run
        try:
            return list(
                self._storage.get_metric_values(run.project, run.name, metric, run_id=run.id, **where)
            )
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # trackio's thread is making the database
                return []
            raise
