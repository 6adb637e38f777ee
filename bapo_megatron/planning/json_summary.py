"""JSON summaries of a plan and of a rehearsal: everything that ``--json`` writes, as plain numbers.

Of a rehearsal ``peak_gb`` by phase, ``host_waits_per_update``, ``collectives``, and each rank. Used by
``commands/plan.py`` and ``page.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bapo_megatron.planning.hardware import GB
from bapo_megatron.planning.job import Job
from bapo_megatron.planning.open_responses import open_responses
from bapo_megatron.planning.plan import JobPlan
from bapo_megatron.planning.records import RankResult
from bapo_megatron.planning.sizes import active_parameters
from bapo_megatron.planning.verdict import needed, node_bytes, rehearsal_verdict


def plan_dict(plan: JobPlan) -> dict[str, Any]:
    """JSON object of a plan, in bytes, FLOPs and seconds."""
    return {
        "recipe": plan.job.run.name,
        "gpu": plan.job.gpu.name,
        "gpus": plan.job.gpus,
        "budget": plan.job.budget,
        "stages": [
            {
                **{name: value for name, value in vars(stage).items() if name != "parameters"},
                "parameters": stage.parameters.total,
                "training": stage.training,
                "handover": stage.handover,
                "sampling": stage.sampling,
                "peak": stage.peak,
            }
            for stage in plan.stages
        ],
        "host": plan.host,
        "speed": vars(plan.speed),
        "traffic": [vars(part) for part in (*plan.traffic, plan.sync)],
        "engines": vars(plan.engines),
        "environment": found.values() if (found := open_responses(plan)) else None,
        "turns": vars(plan.handover) if plan.handover else None,
        "servers_problem": plan.job.servers_problem,
        "train_seconds": plan.train_seconds,
        "sampling_seconds": plan.sampling_seconds,
        "step_seconds": plan.step_seconds,
        "run_seconds": plan.run_seconds,
        "checkpoint_seconds": plan.checkpoint_seconds,
        "disk": plan.disk,
        "rollouts": plan.rollouts,
        "trainer_nodes": plan.trainer_nodes,
        "server_nodes": plan.server_nodes,
        "fits": plan.verdict.fits,
        "misfits": plan.verdict.problems,
    }


def rehearsal_dict(results: Sequence[RankResult], job: Job, mismatches: Sequence[str] = ()) -> dict[str, Any]:
    """The rehearsal as plain numbers. ``peak_gb`` and the waits are the highest of any rank."""
    verdict = rehearsal_verdict(results, job, mismatches)
    phases = list(dict.fromkeys(phase for result in results for phase in result.gpu))
    return {
        "recipe": job.run.name,
        "layers": results[0].layers,
        "gpu": job.gpu.name,
        "world_size": job.gpus,
        "packs": results[0].packs,
        "fits": verdict.fits,
        "misfits": verdict.problems,
        "peak_gb": {
            phase: max(result.gpu[phase].size for result in results if phase in result.gpu) / GB
            for phase in phases
        },
        "host_waits_per_update": max(sum(result.update_waits().values()) for result in results),
        "collectives": collectives(max(results, key=lambda result: result.highest)),
        "host_gb_of_a_node": node_bytes(results, job) / GB,
        "ranks": [_rank_dict(result, job) for result in results],
    }


def _rank_dict(result: RankResult, job: Job) -> dict[str, Any]:
    """One rank as plain numbers."""
    return {
        "rank": result.rank,
        "place": result.place,
        "error": result.error,
        "peak_gb": {phase: peak.size / GB for phase, peak in result.gpu.items()},
        "needed_gb": {phase: needed(result, phase, job) / GB for phase in result.gpu},
        "kinds_gb": {
            phase: {kind: size / GB for kind, size in peak.kinds.items()}
            for phase, peak in result.gpu.items()
        },
        "host_gb": {phase: peak.size / GB for phase, peak in result.host.items()},
        "host_kinds_gb": {
            phase: {kind: size / GB for kind, size in peak.kinds.items()}
            for phase, peak in result.host.items()
        },
        "largest": [vars(one) for one in result.largest],
        "tflop": {phase: flops / 1e12 for phase, flops in result.flops.items()},
        "model_tflop": model_flops(result, job) / 1e12,
        "host_waits_per_update": sum(result.update_waits().values()),
        "host_waits": [{**wait._asdict(), "count": n} for wait, n in sorted(result.waits.items())],
        "guessed_values": [{**wait._asdict(), "count": n} for wait, n in sorted(result.guesses.items())],
        "collectives": collectives(result),
        "seconds": result.seconds,
        "kernels": result.kernels,
    }


def collectives(result: RankResult) -> list[dict[str, Any]]:
    """A rank's collectives by phase, group and kind of call, with count and bytes."""
    counts: Counter[tuple[str, str, int, str]] = Counter()
    sizes: Counter[tuple[str, str, int, str]] = Counter()
    for call in result.calls:
        key = (call.phase, call.group, len(call.ranks), call.op)
        counts[key] += 1
        sizes[key] += call.size
    names = ("phase", "group", "ranks", "op")
    return [
        {**dict(zip(names, key, strict=True)), "count": n, "gb": sizes[key] / GB} for key, n in counts.items()
    ]


def model_flops(result: RankResult, job: Job) -> float:
    """Model FLOPs of this GPU, 6 N D / model-parallel size: N parameters that a token passes, D tokens of the
    packs."""
    tokens = result.packs * job.run.batch.pack_tokens
    return 6.0 * active_parameters(job.shape) * tokens / job.parallel.model_size
