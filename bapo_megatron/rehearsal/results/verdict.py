"""Memory verdict of a rehearsal: whether each rank's peaks fit its GPU, and a node's its host memory.

The rehearsed peaks, and what ``bapo plan`` adds for reserve and colocated servers, against
``memory_fraction``. Used by ``commands/cluster/job.py``, ``page.py`` and ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bapo_megatron.commands.plan.hardware import GB
from bapo_megatron.commands.plan.job import Job
from bapo_megatron.commands.plan.memory import FIXED, FRAGMENTATION, stage_memory
from bapo_megatron.rehearsal.records import HAND_OVER, SAMPLE, Peak, RankResult

_STEADY = ("weights", "gradients", "optimizer")


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
    return peak.size + FIXED + (FRAGMENTATION * passing if is_pass(phase) else 0.0)


def is_pass(phase: str) -> bool:
    """Whether a phase is a pass over packs, where activations come and go."""
    return phase.startswith(("update", "bounds search", "old log-probs"))


def misfits(results: Sequence[RankResult], job: Job) -> Iterator[str]:
    """The limits that are exceeded and the ranks that failed, one line for each."""
    budget = job.options.memory_fraction * job.gpu.memory
    host_budget = job.options.memory_fraction * job.gpu.host_memory
    for result in results:
        if result.error:
            yield f"rank {result.rank} fails in {result.error}"
        for phase in result.gpu:
            if needed(result, phase, job) > budget:
                yield (
                    f"rank {result.rank} needs {needed(result, phase, job) / GB:.1f} GB in {phase}; "
                    f"a GPU may use {budget / GB:.1f}"
                )
    host = node_bytes(results, job)
    if host > host_budget:
        yield f"a node's host needs {host / GB:.0f} GB; it may use {host_budget / GB:.0f}"


def node_bytes(results: Sequence[RankResult], job: Job) -> float:
    """Host memory of a node whose ranks all need as much as the rank with the highest peak."""
    highest = max((peak.size for result in results for peak in result.host.values()), default=0)
    return float(highest * job.gpus_on_node)
