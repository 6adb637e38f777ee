"""Distillation teacher of a plan: tokens its servers read, the rate that hides them, memory of its log-probs.

``teacher_plan`` returns the estimate. The servers are outside the job and their speed is unknown, so a plan
counts no seconds for them but states the speed they need. The sampler sends each group once it has rewards
and is kept, while sampling continues; training waits for its log-probs.
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
    """Estimate for a teacher's servers: responses and tokens per step, the tokens per second that they need,
    and bytes of their log-probs on a GPU and on disk."""

    responses: int
    """Responses scored per step; dropped groups are not sent."""
    tokens: float
    """Tokens read per step, one prefill per response with its prompt: an upper estimate, since servers may
    cache a group's prompt."""
    tokens_per_second: float | None
    """Rate that keeps up with sampling: over the sampling seconds, or the whole step where engines sample
    during training; None if no engine can sample. At this rate only ``serial_tokens`` cost time."""
    serial_tokens: int
    """Most tokens of a step's last group, if sampling ends with it (``max_staleness`` 0): training waits for
    these, or more, since many groups end late with their longest response. Otherwise 0: engines keep
    sampling."""
    gpu_bytes: float
    """Bytes of the log-prob column in an update's packs on a GPU; every run has it, within ``buffers``."""
    file_bytes: float
    """Bytes of the log-probs in a step's file, part of ``rollouts``."""

    def values(self) -> dict[str, Any]:
        return asdict(self)


def teacher_plan(plan: JobPlan) -> TeacherPlan | None:
    """Return the estimate; None without a teacher, or for a replay, whose rollouts store its log-probs."""
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
    """Yield the teacher section of a plan's page; nothing without a teacher."""
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
