"""A sampler that may die at any write, on engines that fail, with a clock that costs nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.rollout.sampler.step_batches import step_groups, write_step
from bapo_megatron.rollout.sampler.write_ahead_log import Record, WriteAheadLog
from bapo_megatron.runtime.storage import DiskError
from bapo_megatron.types import GenerateRequest, Generation, StepBatch
from tests.support.accounts import check_accounts
from tests.support.audit import Audit
from tests.support.raw_journal import RawRecord, keep_logs, read_log
from tests.support.sampling import EOS, ScriptedEngine, World
from tests.support.virtual_time import turns

WAYS = ("before", "torn", "between", "after", "full", "power")
"""How a sampler dies in a write: nothing of it is there; a part of its bytes; some of its records; all of it,
but it did not return; the disk was full in the middle, which the sampler saw; or the power fails, and of all
logs only what was synced is left."""


_WRITE = WriteAheadLog.write


class Death(Exception):
    """The process has ended."""


class Disk:
    """The disk of one sampler after the other. Each writes until its ``deadly`` write, in one of ``WAYS``."""

    def __init__(
        self, chance: np.random.Generator, patch: pytest.MonkeyPatch, counted: Callable[[], int]
    ) -> None:
        """``counted``: the tokens that the sampler counts now."""
        self._chance, self._counted, self._written = chance, counted, 0
        self.writes = 0
        self._deadly: int | None = None
        self._way = ""
        self._synced: dict[int, int] = {}
        """Bytes of each file that survive a power failure, by inode."""
        patch.setattr(os, "fsync", self._sync)
        patch.setattr(WriteAheadLog, "write", lambda log, records: self._log(log, list(records)))
        patch.setattr("bapo_megatron.rollout.sampler.group_sampler.write_step", self._step)

    def live(self, deadly: int | None, way: str = "before") -> None:
        """Another process begins; it dies at its write number ``deadly``, if ever."""
        self.writes, self._deadly, self._way = 0, deadly, way

    def _is_deadly(self) -> bool:
        if self._deadly is not None and self.writes > self._deadly:
            raise Death("it is dead already")
        self.writes += 1
        return self._deadly is not None and self.writes > self._deadly

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._synced[status.st_ino] = status.st_size

    def _log(self, log: WriteAheadLog, records: Sequence[Record]) -> None:
        if records[0].kind == "state":
            self._written = records[0].fields["tokens"].get("sampled", 0)
        assert self._counted() == self._written, "tokens count that are not on disk, or the other way round"
        if not self._is_deadly():
            _WRITE(log, records)
            self._written += sum(len(r.arrays["versions"]) for r in records if r.kind == "segments")
            return
        if self._way == "power":
            for path in log.path.parent.glob("segments-*.log"):
                os.truncate(path, self._synced.get(path.stat().st_ino, 0))
        if self._way in ("before", "power"):
            raise Death("before a write")
        if self._way == "after":
            _WRITE(log, records)
            raise Death("after a write")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "writev", _dying(log._file.fileno(), self._way, self._chance))
            _WRITE(log, records)

    def _step(self, folder: Path, step: int, batch: StepBatch, numbers: Sequence[int]) -> None:
        deadly = self._is_deadly()
        if not deadly or self._way in ("after", "between"):
            write_step(folder, step, batch, numbers)
        if deadly:
            raise Death("while a step was written")


def _dying(
    log: int, way: str, chance: np.random.Generator
) -> Callable[[int, Sequence[bytes | memoryview]], int]:
    """A ``writev`` that takes some of a write to the file with the descriptor ``log``, and dies."""
    writev = os.writev

    def write(descriptor: int, parts: Sequence[bytes | memoryview]) -> int:
        if descriptor != log:
            return writev(descriptor, parts)
        whole = b"".join(parts)
        places = [n for n in range(1, len(whole)) if whole[n : n + 3] == b"BPR" and way == "between"]
        os.write(log, whole[: int(chance.choice(places or range(len(whole))))])
        raise OSError(28, "No space left on device") if way == "full" else Death("in a write")

    return write


class MoodyEngine(ScriptedEngine):
    """An engine of random delays, that loads weights between two tokens, aborts in the middle, and fails."""

    def __init__(self, name: str, chance: np.random.Generator, failures: float) -> None:
        super().__init__(answer, name)
        self._chance, self._failures = chance, failures
        self.said: dict[str, list[Generation]] = {}
        """What it returned for each request."""

    async def generate(self, request: GenerateRequest) -> Generation:
        before = self.version
        await turns(self._chance, 30)
        if self._chance.random() < self._failures:
            raise RuntimeError("the server has died")
        found = self._answer(request, aborted=False)
        length = len(found.token_ids_R)
        if self._chance.random() < 0.2:
            length = int(self._chance.integers(0, length))
        ids, old = found.token_ids_R[:length], int(self._chance.integers(0, length + 1))
        versions = np.where(np.arange(length) < old, min(before, self.version), self.version)
        log_probs = -self._chance.random(length).astype(np.float32)
        answer = Generation(
            token_ids_R=ids,
            log_probs_R=log_probs,
            versions_R=versions.astype(np.int32),
            request_id=request.request_id,
            finish_reason="stop" if length and ids[-1] == EOS else "abort",
        )
        self.said.setdefault(request.request_id, []).append(answer)
        return answer


def answer(prompt: int, sample: int) -> str:
    """The response: 1 to 13 tokens with the end; one group in four is uniform."""
    return ("y" if sample == 0 and prompt % 4 else "n") + "abcdefghijkl"[: (prompt * 7 + sample * 3) % 12]


class MortalRun:
    """A trainer that goes through its steps, with one sampler after the other."""

    def __init__(self, folder: Path, chance: np.random.Generator, patch: pytest.MonkeyPatch, **rollout: Any):
        self._chance = chance
        self.disk = Disk(chance, patch, lambda: self.world.sampler.state()["tokens"].get("sampled", 0))
        self.engines = [MoodyEngine(name, chance, failures=0.02) for name in ("one", "two")]
        settings = {"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 12, "segment_tokens": 3}
        self.world = World(folder, self.engines, **{"prompts": 7, **settings, **rollout})
        self.reached = 1
        """The step that comes next."""
        self._saved = 0
        """The step of the last checkpoint."""
        self._given: dict[int, list[int]] = {}
        self._versions = {0: 0}
        """Of the weights that each step makes."""
        self.world.version_of = self._versions.__getitem__

    async def live(self, steps: int, deadly: int | None, way: str = "before") -> bool:
        """Run steps to the end, or to the death of the sampler; whether the end was reached."""
        self.disk.live(deadly, way)
        try:
            async with self.world.sampling(self.reached, rounds=False, most=int(self._chance.integers(1, 9))):
                while self.reached <= steps:
                    await self._step()
        except (Death, DiskError):
            if self._chance.random() < 0.5:  # the trainer has died, too
                self.reached = self._saved + 1
            return False
        finally:
            keep_logs(self.world.journal, self.kept)
        return True

    async def _step(self) -> None:
        step, world = self.reached, self.world
        path = None
        for _ in range(40):
            if path := await world.sampler.next_batch(step, float(self._chance.choice([0.0, 0.01, 30.0]))):
                break
        assert path is not None, f"step {step} gets no groups"
        numbers = step_groups(world.journal, step)
        assert self._given.setdefault(step, numbers) == numbers, "a step got other groups than before"
        self._versions[step] = self._versions[step - 1] + bool(numbers)
        await turns(self._chance, 80)
        await world.weights(step)
        self.reached += 1
        if self._chance.random() < 0.4:
            keep_logs(world.journal, self.kept)
            await world.sampler.checkpointed(step)
            self._saved = step

    @property
    def kept(self) -> Path:
        """A folder with all logs."""
        return self.world.journal.with_name("kept")

    def check(self) -> Audit:
        """Hold the journal to its rules, and to what the engines said."""
        world = self.world
        found = check_accounts(self.kept, world.journal, world.config.rollout, world.dataset.prompts)
        said = {
            (request, part.token_ids_R.tobytes(), part.log_probs_R.tobytes(), part.versions_R.tobytes())
            for engine in self.engines
            for request, parts in engine.said.items()
            for part in parts
        }
        for path in sorted(self.kept.iterdir()):
            for record in read_log(path):
                if record.kind == "segments":
                    assert set(segments_of(record)) <= said
        lost = [event["reason"] for event in world.events if event["kind"] == "engine_lost"]
        assert set(lost) <= {"the server has died"}
        return found


def segments_of(record: RawRecord) -> Iterator[tuple[str, bytes, bytes, bytes]]:
    """The request of each segment, and the bytes of its tokens, log-probs and versions."""
    at = 0
    columns = [record.arrays[name] for name in ("token_ids", "log_probs", "versions")]
    for number, _epoch, _index, sample, start, length, _reason in record.fields["parts"]:
        tokens, log_probs, versions = (one[at : at + length].tobytes() for one in columns)
        yield f"{number}-{sample}-{start}", tokens, log_probs, versions
        at += length
