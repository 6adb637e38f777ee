"""A checkpoint of the policy continues at any layout; processes that write one, and are killed meanwhile."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.multiprocessing.spawn import ProcessRaisedException

from bapo_megatron.checkpoint import reader as checkpoint
from bapo_megatron.checkpoint.store import digest
from bapo_megatron.config import ParallelConfig
from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.background_save import BackgroundSave
from bapo_megatron.policy.megatron_versions import writer_forks
from bapo_megatron.runtime.guards import OutOfMemoryError
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.layouts import layout
from tests.support.models import save_tiny_model
from tests.support.policies import small_policy, updates_of, weights_of
from tests.support.saves import complete
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed


def save_and_go_on(
    folder: Path, dtype: str, samples: list[Sample], parallel: ParallelConfig, path: Path, load: bool
) -> list:
    """Two updates, save, two more; or load and two more. Losses, gradient norms and weights at the end.

    The warmup ends and the decay begins after the save, so the schedule's place matters.
    """
    policy = small_policy(folder, parallel, dtype, warmup_updates=3, decay="cosine")

    def go(count: int) -> list[tuple[float, float, float]]:
        results = updates_of(policy, samples, count)
        return [(float(r.sums[0]), r.grad_norm, r.learning_rate) for r in results]

    if load:
        policy.load(path, 2)
    else:
        go(2)
        saving = policy.save(path)
    steps = go(2)  # while it is being written
    if not load:
        complete(saving)
    return [steps, weights_of(policy)]


CONTINUED = (*(("bfloat16", "pp2-vpp2"), ("bfloat16", "dp2-tp2-sp"), ("float32", "pp2-cp2")),)


@pytest.mark.parametrize(("dtype", "text"), slow_but(CONTINUED, ("bfloat16", "pp2-vpp2")))
def test_a_checkpoint_continues_bitwise(
    dtype: str, text: str, qwen2: Path, samples: list[Sample], tmp_path: Path
) -> None:
    written, path = layout(text).parallel, tmp_path / "policy"
    [steps, weights], *_ = run_layout(save_and_go_on, written, qwen2, dtype, samples, written, path, False)
    [again, same], *_ = run_layout(save_and_go_on, written, qwen2, dtype, samples, written, path, True)
    assert again == steps
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())


def save_before_any_update(folder: Path, samples: list[Sample], path: Path) -> tuple[list, list]:
    """What two updates give on a fresh policy, and on one that has loaded its untouched checkpoint."""

    fresh, loaded = small_policy(folder), small_policy(folder)
    complete(fresh.save(path))
    loaded.load(path, 0)
    go = ([(float(r.sums[0]), r.grad_norm) for r in updates_of(one, samples, 2)] for one in (fresh, loaded))
    return next(go), next(go)


def test_a_checkpoint_before_any_update(qwen2: Path, samples: list[Sample], tmp_path: Path) -> None:
    """A hard dataset may give no informative group until the first checkpoint is due."""
    arguments = (qwen2, samples, tmp_path / "policy")
    [(fresh, loaded)] = run_layout(save_before_any_update, ParallelConfig(), *arguments)
    assert fresh == loaded


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_name(
    qwen2: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """One with tied embeddings has no output layer."""
    tied = save_tiny_model("qwen2", tmp_path / "tied", tie_word_embeddings=True)
    one, path = ParallelConfig(), tmp_path / "policy"
    run_layout(save_and_go_on, one, tied, "float32", samples, one, path, False)
    with pytest.raises(
        ProcessRaisedException, match=r"lacks \d+ parts that this model has.*output_layer\.weight"
    ):
        run_layout(save_and_go_on, one, qwen2, "float32", samples, one, path, True)


def _verified(folder: Path) -> tuple[int, list[str]]:
    """The step of the checkpoint that is taken, and the files that this rank has read."""
    read: list[str] = []
    real = checkpoint.digest

    def noting(path: Path) -> dict[str, Any]:
        read.append(path.name)
        return real(path)

    checkpoint.digest = noting
    latest = checkpoint.latest_checkpoint(RunPaths(folder))
    assert latest is not None
    assert latest.trainer == {"version": latest.step}
    return latest.step, read


def _write_checkpoint(folder: Path, step: int, sizes: list[int]) -> None:
    path = folder / f"checkpoints/step_{step:06d}"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"version": step}))
    for number, size in enumerate(sizes):
        (path / f"part{number}").write_bytes(bytes([number]) * size)
    files = {file.name: digest(file) for file in path.iterdir()}
    (path / "manifest.json").write_text(json.dumps({"files": files}))


@pytest.mark.parametrize("damaged", [0, 3])
def test_ranks_share_the_reading_of_a_checkpoint(damaged: int, tmp_path: Path) -> None:
    """Whichever rank's share is damaged, all ranks take the same older one."""
    sizes = [100, 5000, 3000, 4000, 2000]
    _write_checkpoint(tmp_path, 1, sizes)
    _write_checkpoint(tmp_path, 2, sizes)
    first = run_layout(_verified, ParallelConfig(data=2), tmp_path)
    assert [step for step, _ in first] == [2, 2]
    # By size: part1 part3 part2 part4 part0 trainer.json, in turn.
    assert [sorted(read) for _, read in first] == [
        ["part0", "part1", "part2"],
        ["part3", "part4", "trainer.json"],
    ]
    (tmp_path / f"checkpoints/step_000002/part{damaged}").write_bytes(bytes(sizes[damaged]) + b"x")
    assert [step for step, _ in run_layout(_verified, ParallelConfig(data=2), tmp_path)] == [1, 1]


def _write(pids: Path) -> None:
    """As megatron before 0.17: a fork of the writer writes, the writer waits for its word."""
    context = multiprocessing.get_context("fork")
    done = context.JoinableQueue()
    done.put(0)
    finished = context.Process(target=int)
    finished.start()
    finished.join(10)
    fork = context.Process(target=time.sleep, args=(3600,))
    fork.start()
    pids.with_suffix(".tmp").write_text(f"{os.getpid()} {fork.pid}")
    pids.with_suffix(".tmp").rename(pids)
    done.join()


def _killed(which: int, number: int, pids: Path) -> str:
    """Kill the writer, or its fork: what the trainer is told."""
    saving = BackgroundSave(AsyncRequest(_write, (pids,), []))
    begun = time.monotonic()
    while not pids.exists():
        assert time.monotonic() < begun + 60, "nothing is written"
        time.sleep(0.05)
    both = [int(word) for word in pids.read_text().split()]
    assert not saving.is_written()
    os.kill(both[which], number)
    deadline = time.monotonic() + 60
    while not saving.is_written():
        assert time.monotonic() < deadline, "nobody notices"
        time.sleep(0.05)
    try:
        saving.finish()
    except (OutOfMemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with suppress(ProcessLookupError):
            os.kill(both[1], signal.SIGKILL)
    return "all is well"


@pytest.mark.parametrize(("which", "number"), [(0, 11), (0, 9), (1, 9)][: 2 + writer_forks()])
def test_a_writer_that_is_killed_is_noticed(which: int, number: int, tmp_path: Path) -> None:
    """By the kernel for lack of memory, say: a fork that copies what it writes is what it kills first."""
    [told] = run_layout(_killed, ParallelConfig(), which, number, tmp_path / "pids")
    kind, name = ("OutOfMemoryError", "SIGKILL") if number == 9 else ("RuntimeError", "SIGSEGV")
    assert told.startswith(
        f"{kind}: the process that writes the checkpoint has not finished: killed by {name}"
    )


def _blocked(folder: Path, path: Path, file: str) -> str:
    """Save where a folder has the name of a file that a writer needs: what the trainer is told."""
    (path / file).mkdir(parents=True)
    try:
        complete(small_policy(folder).save(path))
    except BaseException as error:  # torch's is not an Exception
        return str(error)
    return "all is well"


@pytest.mark.parametrize("file", ["__0_0.distcp", "__0_1.distcp"][: 1 + writer_forks()])
def test_a_writer_that_fails_says_why(file: str, qwen2: Path, tmp_path: Path) -> None:
    [told] = run_layout(_blocked, ParallelConfig(), qwen2, tmp_path / "policy", file)
    assert "Is a directory" in told


class _OnGpu:
    """Stands for a tensor on a GPU, and changes as training does: its host copy is ``value``, if pageable."""

    value = 3.0

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert (device, non_blocking) == ("cpu", False), "pinned memory is shared with the fork"
        return torch.full((4,), self.value)


def _writes_what_it_got(path: Path, buckets: list[Any], _queue: Any) -> None:
    """A writer that begins when the trainer has gone on."""
    while not path.exists():
        time.sleep(0.05)
    [(file, _, (_, [(_, copy)]))] = buckets
    torch.save(copy, file)


def _copied(path: Path) -> torch.Tensor:
    tensor = _OnGpu()
    buckets = [(str(path.with_name("written")), "key", ([], [("item", tensor)]))]
    preload = partial(list, buckets)
    saving = BackgroundSave(AsyncRequest(_writes_what_it_got, (path, buckets, None), [], preload_fn=preload))
    tensor.value = 4.0
    assert not saving.is_written()
    path.touch()
    while not saving.is_written():
        time.sleep(0.05)
    saving.finish()
    return torch.load(path.with_name("written"))


def test_a_gpus_tensors_are_copied_to_pageable_memory_before_the_fork(tmp_path: Path) -> None:
    [written] = run_layout(_copied, ParallelConfig(), tmp_path / "go")
    assert written.tolist() == [3.0] * 4


class _Store:
    """As a store of torch.distributed, whose end waits for a thread that a fork does not have."""

    def __init__(self) -> None:
        self.itself = self
        self.home = os.getpid()

    def __del__(self) -> None:
        while os.getpid() != self.home:
            time.sleep(0.05)


def _collects(path: Path) -> None:
    """A writer that collects garbage, as megatron's does now and then."""
    gc.collect()
    path.touch()


def _with_garbage(path: Path) -> bool:
    gc.disable()
    _Store()
    saving = BackgroundSave(AsyncRequest(_collects, (path,), []))
    deadline = time.monotonic() + 120
    while not saving.is_written():
        assert time.monotonic() < deadline, "the writer waits for ever"
        time.sleep(0.05)
    saving.finish()
    gc.enable()
    return path.exists()


def test_the_trainers_garbage_does_not_hold_the_writer(tmp_path: Path) -> None:
    assert run_layout(_with_garbage, ParallelConfig(), tmp_path / "done") == [True]
