"""Stand-in for `bapo train` and `bapo rollout-server` in Slurm jobs: same signals, files and exit codes.

``python stand_in.py train RECIPE [--stand-in.NAME=VALUE ...] --run-dir RUN [...]``: makes steps of ``step_s``
seconds, with metrics, events and checkpoints as a run writes them, and continues from the newest checkpoint.
On SIGUSR1 or SIGTERM it saves and exits with 85. Only the rank 0 writes; the others wait for its last word.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[2]))

from bapo_megatron.rollout.engines.sglang_launch import api_key


def option(name: str, default: str) -> str:
    """The last ``--NAME=VALUE`` or ``--NAME VALUE`` on the command line."""
    found = default
    for number, word in enumerate(sys.argv):
        if word.startswith(f"--{name}="):
            found = word.partition("=")[2]
        elif word == f"--{name}":
            found = sys.argv[number + 1]
    return found


RUN = Path(option("run-dir", "."))
KEY_FILE = Path(os.environ.get(api_key.VARIABLE) or RUN / "api_key")
RANK = int(os.environ.get("RANK", "0"))
STOP = False


def told(_number: int, _frame: FrameType | None) -> None:
    """A signal: save and stop."""
    global STOP
    STOP = True


HARM = option("stand-in.harm", "")


def killed_or_waiting() -> None:
    """The last rank ends as by the kernel, for its memory; the others wait for it, as NCCL does."""
    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def append(name: str, row: dict[str, object]) -> None:
    with (RUN / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def event(kind: str, **fields: object) -> None:
    append(
        "events.jsonl", {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **fields}
    )


def save(step: int) -> None:
    """A checkpoint whose manifest comes last."""
    folder = RUN / f"checkpoints/step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
    event("checkpoint", step=step, seconds=0.0)


def newest() -> int:
    found = [int(path.parent.name[5:]) for path in RUN.glob("checkpoints/step_*/manifest.json")]
    return max(found, default=0)


def train() -> None:
    """One rank."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, told)
    steps, every = int(option("stand-in.steps", "5")), int(option("stand-in.every", "1000"))
    step_s, crash_at = float(option("stand-in.step-s", "0.2")), int(option("stand-in.crash-at", "0"))
    code = int(option("stand-in.code", "0"))
    start = newest()
    if RANK == 0:
        urls = (
            sys.argv[sys.argv.index("--rollout.sglang.urls") + 1 :]
            if "--rollout.sglang.urls" in sys.argv
            else []
        )
        event(
            "start" if start == 0 else "resume",
            step=start + 1,
            processes=int(os.environ["WORLD_SIZE"]),
            urls=urls,
        )
    if code:
        print("stopped: the run has no engines" if code == 3 else "error: a field is wrong", file=sys.stderr)
        sys.exit(code)
    for step in range(start + 1, steps + 1):
        time.sleep(step_s)
        if STOP:
            if RANK == 0 and step > start + 1:
                save(step - 1)
            sys.exit(85)
        if step == crash_at and HARM == "memory":
            killed_or_waiting()
        if step == crash_at and int(os.environ["WORLD_SIZE"]) - 1 == RANK:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if step == crash_at:
            time.sleep(1)
            raise ConnectionError("the last rank has gone")
        if RANK == 0:
            append("metrics.jsonl", {"step": step, "reward/mean": 0.5, "time/tokens_per_s": 100.0})
            if step % every == 0 or step == steps:
                save(step)
    print("all steps made")


class Server(BaseHTTPRequestHandler):
    """HTTP handler of a healthy rollout server that asks for the run's key."""

    def do_GET(self) -> None:
        """200 for readiness, and for everything with the key."""
        given = self.headers.get("Authorization")
        may_pass = self.path == "/ready" or given == f"Bearer {api_key.read_key_file(KEY_FILE).value}"
        self.send_response(200 if may_pass else 401)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_words: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train()
    else:
        api_key.make_key_file(KEY_FILE)
        HTTPServer((option("host", "127.0.0.1"), int(option("port", "0"))), Server).serve_forever()
