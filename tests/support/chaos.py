"""A run with two real SGLang servers, and everything that can happen to it, at random.

    python -m tests.support.chaos [--kills 200] [--seed 0] [--sync broadcast]
    python -m tests.support.chaos --colocated [--sync ipc]
    python -m tests.support.chaos --agents

Servers, the sampler and the trainer are killed with -9, servers and the sampler are stopped for a while with
SIGSTOP. Then the run continues in peace for a few steps, and its journal is audited (tests/support/audit.py):
every token that was sampled was trained on, dropped by rule, or is still in the journal; no group was trained
twice; the losses equal those of a replay of the journal.

Kills come as soon as a server has answered a call that leads from one state to the next, or the trainer has
made an update. ``--colocated``: the servers give up their memory while the policy trains.

``--agents``: the demo's policy, asked by agent programs (unruly_agent.py), which are killed, too, as are the
workers of environments; the audit hears what the programs say (agent_accounts.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.accounts import check_run
from tests.support.agent_accounts import check_agents
from tests.support.forked_commands import start_bapo
from tests.support.processes import environments_of, sampler_of, servers_of
from tests.support.raw_journal import keeping_logs

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/demo_sglang_cpu.py"
FLAGS = [
    "--steps=100000",
    "--rollout.prompts-per-step=4",
    "--rollout.group-size=4",
    "--rollout.segment-tokens=8",
    "--rollout.max-staleness=2",
    "--rollout.sglang.servers=2",
    "--checkpoint.every=3",
    "--algorithm.updates-per-epoch=2",
    "--algorithm.reuse-epochs=1",
]
HARMS = (
    *("kill a server", "stop a server", "kill the sampler", "kill the sampler"),
    *("stop the sampler", "kill the trainer", "kill everything"),
)

KILLS = ("kill a server", "kill the sampler", "kill the sampler", "kill the trainer", "kill everything")
COLOCATED = ("--rollout.sglang.colocated", "--parallel.offload")
ARROWS = ("abort_request", "continue_generation", "update", "checkpoint")
COLOCATED_ARROWS = (
    *("abort_request", "pause_generation", "release_memory_occupation", "resume_memory_occupation"),
    *("update_weights_from_disk", "weights_checker", "continue_generation", "update", "checkpoint"),
)
IPC_ARROWS = (
    *("abort_request", "pause_generation", "release_memory_occupation", "resume_memory_occupation"),
    *("begin_weight_update", "update_weights_from_tensor", "end_weight_update", "update_weight_version"),
    *("weights_checker", "continue_generation", "update", "checkpoint"),
)
"""What a kill waits for: a call that a server answers, as its log says, or a line of the run's own logs."""

AGENT_KILLS = (*KILLS, "kill a server", *["kill an environment worker", "kill an agent program"] * 2)
WRITTEN = {"update": ("updates.jsonl", b"\n"), "checkpoint": ("events.jsonl", b'"saving"')}
"""Of the run's own logs."""
AGENT_ARROWS = {
    "a program asks": b'"what": "asked"',
    "a stream is cancelled": b'"what": "cancels"',
    "a program disconnects": b'"what": "disconnects"',
    "a program is answered": b'"what": "answered"',
}
"""What a kill waits for in a run with agent programs: a line of their log."""
AGENT = ROOT / "tests/support/unruly_agent.py"
SMALL = (
    *("--rollout.prompts-per-step=2", "--rollout.group-size=3", "--algorithm.updates-per-epoch=1"),
    *("--reward.workers=1", "--environment.workers=1"),
)
"""A program for each episode, and many starts: a step is to be short."""
AGENT_FLAGS = (
    *("--environment.workers=2", "--evaluation.every=0", "--rollout.keep-steps=None"),
    *("--rollout.engine=sglang", "--rollout.max-oversampling=1.5", "--optimizer.lr=1e-5"),
)

PATIENCE_S = 900.0
"""A run that makes no step for so long hangs: two servers start on two cores that others may use."""


@dataclass(frozen=True)
class Target:
    """What is harmed: a recipe with its flags."""

    recipe: Path = RECIPE
    flags: tuple[str, ...] = ()
    agents_log: Path | None = None
    """What agent programs note, if it has them."""


def with_agents(folder: Path) -> Target:
    """The demo's policy, asked by an agent program that rewrites its history and ends its requests."""
    log = folder / "agents.log"
    settings = {"command": [sys.executable, str(AGENT), str(log)]}
    flags = (
        "--environment.function=bapo_megatron.environment.adapters.endpoint:EndpointEnvironment",
        *(f"--environment.settings={json.dumps(settings)}", "--environment.max-turns=8"),
    )
    return Target(ROOT / "recipes/demo_tools_cpu.py", (*AGENT_FLAGS, *SMALL, *flags), log)


class Run:
    """The command, started again whenever it has ended."""

    def __init__(self, run_dir: Path, target: Target, flags: Iterable[str]) -> None:
        self.run_dir, self.target = run_dir, target
        self._flags = [*FLAGS, *target.flags, *flags]
        self._log = (run_dir.parent / "chaos.log").open("ab")
        self.start()

    def start(self) -> None:
        """As a user, or a scheduler, would."""
        flags = (*self._flags, f"--run-dir={self.run_dir}")
        self.process = start_bapo("train", self.target.recipe, *flags, log=self._log.fileno())

    @property
    def steps(self) -> int:
        """Lines of metrics, which a continuation may take back."""
        log = self.run_dir / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def harm(self, kind: str, chance: random.Random) -> bool:
        """Do it, and start the command again if it was hit. False if there was nothing to harm."""
        servers = [s for s in servers_of(self.run_dir) if os.getpgid(s.pid) == s.pid]
        if kind == "kill a server" and servers:
            os.killpg(chance.choice(servers).pid, signal.SIGKILL)
        elif kind == "stop a server" and servers:
            group = chance.choice(servers).pid
            os.killpg(group, signal.SIGSTOP)
            time.sleep(chance.uniform(2, 25))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)
        elif kind == "kill the sampler" and (sampler := sampler_of(self.process.pid)):
            sampler.kill()
        elif kind == "stop the sampler" and (sampler := sampler_of(self.process.pid)):
            sampler.suspend()
            time.sleep(chance.uniform(2, 25))
            with contextlib.suppress(psutil.NoSuchProcess):
                sampler.resume()
        elif kind == "kill an environment worker" and (workers := environments_of(self.process.pid)):
            chance.choice(workers).kill()
        elif kind == "kill an agent program" and (programs := environments_of(self.process.pid, str(AGENT))):
            chance.choice(programs).kill()
        elif kind == "kill the trainer":
            self.process.kill()  # alone: the sampler and the servers must notice
        elif kind == "kill everything":
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            return False
        if "trainer" in kind or "everything" in kind:
            self.process.wait()
            self.start()
        return True

    def wait_for_arrow(self, arrow: str, most_s: float = 60.0) -> bool:
        """Wait until it is passed again; whether it was, in ``most_s`` seconds."""
        logs, text = self._watched(arrow)
        seen = [log.stat().st_size if log.exists() else 0 for log in logs]
        deadline = time.monotonic() + most_s
        while time.monotonic() < deadline:
            if any(log.exists() and text in _from(log, place) for log, place in zip(logs, seen, strict=True)):
                return True
            time.sleep(0.005)
        return False

    def _watched(self, arrow: str) -> tuple[list[Path], bytes]:
        """The logs that show an arrow, and the text that does."""
        if arrow in WRITTEN:
            log, text = WRITTEN[arrow]
            return [self.run_dir / log], text
        if self.target.agents_log:
            return [self.target.agents_log], AGENT_ARROWS[arrow]
        return sorted((self.run_dir / "logs").glob("server-*.log")), b"POST /" + arrow.encode()

    def wait_for_steps(self, more: int, limit_s: float) -> None:
        """Until so many steps were made from now on. AssertionError if they are not, or the run ends."""
        goal, deadline = self.steps + more, time.monotonic() + limit_s
        while self.steps < goal:
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}: {self.tail()}"
            assert time.monotonic() < deadline, f"no step for {limit_s:.0f} s: {self.tail()}"
            time.sleep(0.2)

    def stop(self) -> None:
        """Ctrl-C; again, as a person would, if it is lost: Python drops one that comes within a fork."""
        for patience_s in (60, 60, 120):
            os.killpg(self.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
                return
        raise AssertionError(f"the run does not heed Ctrl-C: {self.tail()}")

    def tail(self) -> str:
        return (self.run_dir.parent / "chaos.log").read_bytes()[-3000:].decode(errors="replace")


def _from(log: Path, place: int) -> bytes:
    with log.open("rb") as file:
        file.seek(place)
        return file.read()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", choices=("disk", "broadcast", "ipc"), default="disk")
    parser.add_argument("--colocated", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--folder", type=Path, help="of the run, which is kept; else a temporary one")
    given = parser.parse_args()
    flags, arrows, target = [f"--rollout.sglang.sync={given.sync}"], ARROWS, Target()
    with tempfile.TemporaryDirectory() as name:
        chance, kinds = random.Random(given.seed), HARMS
        folder = (given.folder or Path(name)).absolute()
        if given.agents:
            kinds, target, arrows = AGENT_KILLS, with_agents(folder), (*AGENT_ARROWS, *WRITTEN)
        elif given.colocated:
            kinds, arrows = KILLS, IPC_ARROWS if given.sync == "ipc" else COLOCATED_ARROWS
            flags += COLOCATED
        harms = (chance.choice(kinds) for _ in range(given.kills))
        harm_and_check(folder, harms, chance, flags, arrows, target)


def harm_and_check(
    folder: Path,
    harms: Iterable[str],
    chance: random.Random,
    flags: Iterable[str],
    arrows: Sequence[str] = ARROWS,
    target: Target = Target(),
) -> Counter[str]:
    """Do these harms to a run, then hold it to its books. What was done, and the tokens.

    ``arrows``: each harm comes when one of these is passed, or a moment later; the next, after a step.
    """
    done = Counter[str]()
    folder.mkdir(parents=True, exist_ok=True)
    with keeping_logs(folder / "run/journal", folder / "kept"):
        run = Run(folder / "run", target, flags)
        try:
            run.wait_for_steps(1, PATIENCE_S)
            for kind in harms:
                when = chance.choice(arrows)
                if run.wait_for_arrow(when):
                    done["at " + when] += 1
                    time.sleep(chance.choice((0.0, 0.0, chance.uniform(0.0, 0.5))))
                done[kind] += run.harm(kind, chance)
                print(f"{kind} after {when}, at {run.steps} steps", flush=True)
                run.wait_for_steps(1, PATIENCE_S)
            run.wait_for_steps(3, PATIENCE_S)
        finally:
            run.stop()
    found = check_run(run.run_dir, folder / "kept")
    done += Counter({"steps": check_steps(run.run_dir)}) + found.totals()
    if target.agents_log:
        model = json.loads((run.run_dir / "config.json").read_text())["config"]["model.hf_path"]
        tokenizer = load_tokenizer(Path(model))
        done += check_agents(target.agents_log, found.episodes, tokenizer, done["kill an agent program"])
        assert not done["dropped_restarted"], "an environment that is played again gave another answer"
    check_replay(folder, target)
    print(dict(done), flush=True)
    return done


def check_steps(run_dir: Path) -> int:
    """AssertionError if the metrics lack a step, have one twice, or their updates do. Their number."""
    steps = [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), f"steps {steps}"
    versions = [row["version"] for row in read_jsonl(run_dir / "updates.jsonl")]
    assert versions == list(range(1, len(versions) + 1)), f"versions {versions}"
    return len(steps)


def check_replay(folder: Path, target: Target) -> None:
    """A run that is given the journal's steps, and never stopped, has the same losses, bit for bit."""
    run_dir, replay = folder / "run", folder / "replay"
    updates = read_jsonl(run_dir / "updates.jsonl")
    steps = read_jsonl(run_dir / "metrics.jsonl")[-1]["step"]
    more = (f"--steps={steps}", f"--rollout.replay={run_dir}", "--checkpoint.every=100000")
    flags = (*FLAGS, *target.flags, *more, f"--run-dir={replay}")
    command = start_bapo("train", target.recipe, *flags)
    output = command.communicate()[0].decode(errors="replace")
    assert command.returncode == 0, output[-3000:]
    again = read_jsonl(replay / "updates.jsonl")
    names = ("step", "version", "policy/loss", "policy/grad_norm", "bapo/clip_low", "bapo/clip_high")
    ours = [[row[name] for name in names] for row in updates if row["step"] <= steps]
    assert ours == [[row[name] for name in names] for row in again]


if __name__ == "__main__":
    main()
