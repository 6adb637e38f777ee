"""Teacher of a distillation in a plan: the tokens that its servers read, the rate that hides it, its column.

The servers are not part of the job, and their speed is unknown: a plan counts no seconds for them, and says
instead how fast they must be. The sampler sends each group once it has its rewards and is kept
(``rollout/sampler/group_scoring.py``), while it samples others; a group's log-probs are there before it can
be trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bapo_megatron.planning.job import GB
from bapo_megatron.planning.plan import JobPlan
from bapo_megatron.planning.sizes import TEACHER_BYTES


@dataclass(frozen=True)
class TeacherPlan:
    """Estimated work of a teacher's servers in a step, and the memory and disk of their log-probs."""

    responses: int
    """Responses of a step that the servers score: those of dropped groups are not sent."""
    tokens: float
    """Tokens of a step that they read, one prefill for each response with its prompt: an upper estimate,
    since a server may have a group's prompt in its cache."""
    tokens_per_second: float | None
    """The rate at which they read as fast as groups are sampled: over the seconds of sampling, or of the
    whole step where engines sample while the policy trains; None if no engine can sample. From there on their
    time is hidden, but for ``serial_tokens``."""
    serial_tokens: int
    """The most tokens of a step's last group, if sampling ends with it (``max_staleness`` 0): training waits
    for these, or for more, as groups end with their longest response, many of them late. Else 0: engines
    sample on meanwhile."""
    gpu_bytes: float
    """Bytes of the column in an update's packs on a GPU, which every run has: a part of ``buffers``."""
    file_bytes: float
    """Bytes of the log-probs in a step's file: a part of ``rollouts``."""

    def values(self) -> dict[str, Any]:
        return asdict(self)


def teacher_plan(plan: JobPlan) -> TeacherPlan | None:
    """The estimate; None without a teacher, and for a replay, whose rollouts have its log-probs."""
    job, rollout = plan.job, plan.job.run.rollout
    if not job.run.algorithm.distillation.enabled or rollout.replay is not None:
        return None
    tokens = job.responses * (job.mean_prompt + job.mean_response)
    behind = plan.step_seconds if job.overlaps else plan.sampling_seconds
    return TeacherPlan(
        responses=job.responses,
        tokens=tokens,
        tokens_per_second=tokens / behind if math.isfinite(behind) else None,
        serial_tokens=0 if job.partial_rollout else rollout.group_size * job.run.longest_sequence,
        gpu_bytes=job.micro_batches * job.tokens * TEACHER_BYTES,
        file_bytes=job.responses * job.mean_response * TEACHER_BYTES,
    )


def teacher_lines(plan: JobPlan) -> Iterator[str]:
    """Section of a plan's page; none for a run without a teacher."""
    if (teacher := teacher_plan(plan)) is None:
        return
    yield (
        f"Teacher: reads {teacher.tokens:,.0f} tokens a step, a prefill of each of {teacher.responses} "
        "responses with its prompt, on GPUs that are not of this job"
    )
    if rate := teacher.tokens_per_second:
        if teacher.serial_tokens:
            yield (
                f"  beside sampling at {rate:,.0f} tokens/s or more; then serial, on top of the step: the "
                f"last group, at most {teacher.serial_tokens:,} tokens,"
            )
            yield "  or more, for groups end with their longest response, many of them late"
        else:
            behind = "the step" if plan.job.overlaps else "sampling"
            yield (
                f"  hidden behind {behind} at {rate:,.0f} tokens/s or more, for engines sample on meanwhile; "
                "the step's time has none of it"
            )
    yield (
        f"  its log-probs: {teacher.gpu_bytes / GB:.3f} GB of a GPU (in comm, of every run), "
        f"{teacher.file_bytes / GB:.3f} GB of a step's file"
    )
