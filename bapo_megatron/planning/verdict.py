"""Verdict of a plan or a rehearsal: the limits of GPU and host memory that the job exceeds, one line each.

A plan's memory is estimated, a rehearsal's is that of the rehearsed ranks, to which the reserve and the
colocated servers of the estimate are added. Used by ``commands/cluster/job.py``, ``json_summary.py``,
``page.py`` and ``plan.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapo_megatron.planning.hardware import GB
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.memory import FIXED, FRAGMENTATION, stage_memory
from bapo_megatron.planning.records import HAND_OVER, SAMPLE, Peak, RankResult

_STEADY = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Verdict:
    """Reasons why a job does not run or fit, as lines of text; plain data.

    Made by ``JobPlan.verdict`` from estimates, and by ``rehearsal_verdict`` from rehearsed ranks.
    """

    memory: tuple[str, ...]
    """Limits of memory that are exceeded, and ranks that failed."""
    others: tuple[str, ...] = ()
    """Engines that hold no sequence, of a plan; deadlocks, of a rehearsal."""

    @property
    def problems(self) -> list[str]:
        """All lines."""
        return [*self.memory, *self.others]

    @property
    def fits(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def gpu_excess(job: Job, who: str, size: float, when: str) -> Iterator[str]:
    """Line for a stage or a rank that needs more than a GPU's budget; nothing if it does not."""
    if size > job.budget:
        yield f"{who} needs {size / GB:.1f} GB {when}; a GPU may use {job.budget / GB:.1f}"


def host_excess(job: Job, size: float, when: str = "") -> Iterator[str]:
    """Line for a node that needs more than its host memory's budget; nothing if it does not."""
    if size > job.host_budget:
        yield f"a node's host needs {size / GB:.0f} GB{when}; it may use {job.host_budget / GB:.0f}"


def rehearsal_verdict(results: Sequence[RankResult], job: Job, mismatches: Sequence[str] = ()) -> Verdict:
    """Verdict on the rehearsed ranks. ``mismatches``: lines of ``collective_mismatches``."""
    return Verdict(tuple(_misfits(results, job)), tuple(mismatches))


def _misfits(results: Sequence[RankResult], job: Job) -> Iterator[str]:
    for result in results:
        if result.error:
            yield f"rank {result.rank} fails in {result.error}"
        for phase in result.gpu:
            yield from gpu_excess(job, f"rank {result.rank}", needed(result, phase, job), f"in {phase}")
    yield from host_excess(job, node_bytes(results, job))


def needed(result: RankResult, phase: str, job: Job) -> float:
    """GPU memory that a phase of a rank needs: its peak + the plan's reserve + a colocated server's memory.

    The reserve is for the CUDA context and NCCL's buffers, and in passes for allocator fragmentation.
    """
    servers = server_bytes(job, result.place["stage"], phase)
    return _policy_bytes(phase, result.gpu[phase]) + servers


def server_bytes(job: Job, stage: int, phase: str) -> float:
    """GPU memory of a colocated server in a phase: what it never releases; in the hand-over also its weights;
    in sampling also its KV cache."""
    memory = stage_memory(job, stage)
    return memory.kept + {HAND_OVER: memory.reading, SAMPLE: memory.serving}.get(phase, 0.0)


def _policy_bytes(phase: str, peak: Peak) -> float:
    passing = peak.size - sum(peak.kinds.get(kind, 0) for kind in _STEADY)
    return peak.size + FIXED + (FRAGMENTATION * passing if _is_pass(phase) else 0.0)


def _is_pass(phase: str) -> bool:
    """Whether a phase is a pass over packs, where activations come and go."""
    return phase.startswith(("update", "bounds search", "old log-probs", "reference log-probs"))


def node_bytes(results: Sequence[RankResult], job: Job) -> float:
    """Host memory of a node whose ranks all need as much as the rank with the highest peak."""
    highest = max((peak.size for result in results for peak in result.host.values()), default=0)
    return float(highest * job.gpus_on_node)
