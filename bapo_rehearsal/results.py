"""Results of a rehearsal: deadlocks, verdict, text page and JSON. Pure functions of the ranks' results.

Each rank runs alone, so a rank that would hang on the cluster completes here. A deadlock is found afterwards:
the first call in which two members of a group differ, or a send without an equal receive.

The verdict adds the reserve and the colocated servers' memory of the plan's estimate to the measured peaks.
``rehearsal_text`` returns the page, ``rehearsal_dict`` the JSON: peaks, host waits, collectives, each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from bapo_megatron.planning.job import GB, Job
from bapo_megatron.planning.memory import FIXED, FRAGMENTATION, stage_memory
from bapo_megatron.planning.page import aligned, layout_name
from bapo_megatron.planning.plan import Verdict, gpu_excess, host_excess
from bapo_megatron.planning.sizes import active_parameters
from bapo_megatron.runtime.text_table import text_table
from bapo_rehearsal.records import (
    HAND_OVER,
    OFFLOADED,
    SAMPLE,
    SEARCH,
    UPDATE,
    Call,
    Peak,
    RankResult,
)

_POINT_TO_POINT = ("send", "recv")
_OWN_SIZES = ("alltoall", "alltoall_base")
"""Collectives whose message sizes differ between ranks."""
_PASSES = (UPDATE, SEARCH, "old log-probs", "reference log-probs")
"""Prefixes of phases that are passes over packs, which allocate and free activations."""
_STEADY = ("weights", "gradients", "optimizer")
_KINDS = (*_STEADY, "activations", "communication", "passing")
_MOST_LINES = 40


def collective_mismatches(results: Sequence[RankResult]) -> list[str]:
    """Deadlocks, as texts: one per rank that deviates in a group, and per pair with unmatched messages."""
    calls = {result.rank: result.calls for result in results}
    return [*_groups(calls), *_pairs(calls)]


def _groups(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    sequences: dict[tuple[int, ...], dict[int, list[Call]]] = {}
    for rank, made in calls.items():
        for call in made:
            if call.op not in _POINT_TO_POINT and len(call.ranks) > 1:
                sequences.setdefault(call.ranks, {}).setdefault(rank, []).append(call)
    for ranks, by_rank in sequences.items():
        present = [rank for rank in ranks if rank in calls]
        for rank in present[1:]:
            left, right = by_rank.get(present[0], []), by_rank.get(rank, [])
            if line := _first_difference(present[0], left, rank, right):
                yield line


def _first_difference(rank: int, left: Sequence[Call], other_rank: int, right: Sequence[Call]) -> str | None:
    for number, (a, b) in enumerate(zip_longest(left, right), start=1):
        if a is None or b is None or _signature(a) != _signature(b):
            kind = (a or b).group  # type: ignore[union-attr]
            return (
                f"deadlock: in group {kind} ranks {rank} and {other_rank} differ at call {number}: "
                f"{_text(a)}, and {_text(b)}"
            )
    return None


def _signature(call: Call) -> tuple[object, ...]:
    size = None if call.op in _OWN_SIZES else call.size
    return call.op, size, call.dtype, call.device, call.peer


def _text(call: Call | None) -> str:
    if call is None:
        return "no call any more"
    return f"{call.op} of {call.size:,} bytes of {call.dtype} at {call.line} ({call.phase})"


def _pairs(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    sent: dict[tuple[int, int], list[Call]] = {}
    received: dict[tuple[int, int], list[Call]] = {}
    for rank, made in calls.items():
        for call in made:
            if call.peer is None or call.peer not in calls:
                continue
            if call.op == "send":
                sent.setdefault((rank, call.peer), []).append(call)
            elif call.op == "recv":
                received.setdefault((call.peer, rank), []).append(call)
    for source, target in sorted({*sent, *received}):
        messages = zip_longest(sent.get((source, target), []), received.get((source, target), []))
        for number, (a, b) in enumerate(messages, start=1):
            if a is None or b is None or (a.size, a.dtype) != (b.size, b.dtype):
                yield (
                    f"deadlock: message {number} from rank {source} to rank {target}: sent {_text(a)}, "
                    f"received {_text(b)}"
                )
                break


def rehearsal_verdict(results: Sequence[RankResult], job: Job, mismatches: Sequence[str] = ()) -> Verdict:
    """Verdict on the rehearsed ranks. ``mismatches``: lines from ``collective_mismatches``."""
    return Verdict(tuple(_misfits(results, job)), tuple(mismatches))


def _misfits(results: Sequence[RankResult], job: Job) -> Iterator[str]:
    for result in results:
        if result.error:
            yield f"rank {result.rank} fails in {result.error}"
        for phase in result.gpu:
            yield from gpu_excess(job, f"rank {result.rank}", needed(result, phase, job), f"in {phase}")
    yield from host_excess(job, node_bytes(results, job))


def needed(result: RankResult, phase: str, job: Job) -> float:
    """GPU bytes that a rank needs in a phase: its peak + the plan's reserve + a colocated server's memory.

    The reserve covers the CUDA context, NCCL buffers and, in passes over packs, allocator fragmentation.
    """
    peak, fragments = result.gpu[phase], 0.0
    if phase.startswith(_PASSES):
        fragments = FRAGMENTATION * (peak.size - sum(peak.kinds.get(kind, 0) for kind in _STEADY))
    return peak.size + FIXED + fragments + server_bytes(job, result.place["stage"], phase)


def server_bytes(job: Job, stage: int, phase: str) -> float:
    """GPU bytes of a colocated server in a phase: what it never releases; plus its weights in the hand-over,
    or its weights and KV cache in sampling."""
    memory = stage_memory(job, stage)
    return memory.kept + {HAND_OVER: memory.reading, SAMPLE: memory.serving}.get(phase, 0.0)


def node_bytes(results: Sequence[RankResult], job: Job) -> float:
    """Host bytes of a node if each of its ranks needs as much as the rank with the highest peak."""
    highest = max((peak.size for result in results for peak in result.host.values()), default=0)
    return float(highest * job.gpus_on_node)


def rehearsal_text(results: Sequence[RankResult], job: Job, notes: Sequence[str] = ()) -> str:
    """Page of a rehearsal, to print. ``notes``: lines of the verdict besides the memory limits."""
    first = results[0]
    title = (
        f"{job.run.name}: {layout_name(job)}, {job.gpus} GPUs ({job.gpu.name}), layers: {first.layers}, "
        f"{first.packs} pack{'s' * (first.packs > 1)} of {job.run.batch.pack_tokens:,} tokens an update"
    )
    sections = [[title], *(_rank(result, job) for result in results), _verdict(results, job, notes)]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _rank(result: RankResult, job: Job) -> list[str]:
    place = ", ".join(f"{name} {number}" for name, number in result.place.items())
    seconds = sum(result.seconds.values())
    head = f"== rank {result.rank} of {job.gpus}: {place} ({result.kernels:,} kernels in {seconds:.0f} s)"
    if result.error:
        return [head, f"FAILS in {result.error}"]
    blocks = [
        _rank_memory(result, job),
        _largest(result),
        _flops(result, job),
        _collectives(result),
        _waits(result),
    ]
    return [head, *(line for block in blocks for line in ("", *block))]


def _rank_memory(result: RankResult, job: Job) -> Iterator[str]:
    rows = [["peak memory of the GPU, GB", "total", "+ reserve", *_KINDS, "host"]]
    for phase, peak in result.gpu.items():
        kinds = [peak.kinds.get(kind, 0) for kind in _KINDS]
        sizes = [peak.size, needed(result, phase, job), *kinds, result.host[phase].size]
        rows.append([f"  {phase}", *(f"{size / GB:.2f}" for size in sizes)])
    yield from text_table(rows, right=range(1, len(rows[0])))
    if SAMPLE in result.gpu:
        stage = result.place["stage"]
        kept, all_of_it = (server_bytes(job, stage, phase) / GB for phase in (UPDATE, SAMPLE))
        copies = result.host[SAMPLE].kinds.get(OFFLOADED, 0) / GB
        yield (
            f"while engines sample {result.gpu[SAMPLE].size / GB:.2f} GB of the policy stay on the GPU, and "
            f"{copies:.2f} GB are in host memory; the column + reserve has"
        )
        yield f"{kept:.2f} GB more that colocated servers keep, in their own turn {all_of_it:.2f} GB"


def _largest(result: RankResult) -> Iterator[str]:
    yield f"the largest tensors at the peak, in {result.peak_phase}"
    rows = []
    for tensor in result.largest:
        count = f"{tensor.count} x " if tensor.count > 1 else ""
        shape = f"{count}{list(tensor.shape)} {tensor.dtype}"
        rows.append([f"{tensor.size / GB:.2f} GB", shape, tensor.kind, tensor.module or "-", tensor.line])
    yield from text_table(rows, right=(0,), indent=2)


def _flops(result: RankResult, job: Job) -> Iterator[str]:
    model = model_flops(result, job)
    yield f"FLOPs; 6 N D is {model / 1e12:.1f} TFLOP a GPU"
    phases = result.flops.items()
    yield from aligned([[p, f"{n / 1e12:.1f} TFLOP", f"{n / model:.2f} of 6 N D"] for p, n in phases])


def _collectives(result: RankResult) -> Iterator[str]:
    yield "collectives by phase and group: calls, bytes of the whole message"
    rows = []
    for row in collectives(result):
        if row["ranks"] > 1 and not row["phase"].endswith(" 1"):  # the second update repeats the first
            group = f"{row['group']} of {row['ranks']}"
            rows.append([row["phase"], group, row["op"], f"{row['count']:,}", f"{row['gb']:.3f} GB"])
    yield from aligned(rows, left=3)


def _waits(result: RankResult) -> Iterator[str]:
    waits = Counter[tuple[str, str]]()
    for wait, count in result.update_waits().items():
        waits[wait.line, wait.what] += count
    yield f"the host waits for the GPU {waits.total():,} times in an update with its search"
    shown = waits.most_common(_MOST_LINES)
    yield from text_table([[f"{count:,}", what, line] for (line, what), count in shown], right=(0,), indent=2)
    if len(waits) > _MOST_LINES:
        yield f"  and {len(waits) - _MOST_LINES} more lines (--json has them)"


def _verdict(results: Sequence[RankResult], job: Job, notes: Sequence[str]) -> list[str]:
    host = f"a node's host: {node_bytes(results, job) / GB:.0f} GB at most, in a save or a load"
    problems = rehearsal_verdict(results, job, notes).problems
    return [host, *(f"DOES NOT FIT: {line}" for line in problems)] if problems else [host, "FITS"]


def rehearsal_dict(results: Sequence[RankResult], job: Job, mismatches: Sequence[str] = ()) -> dict[str, Any]:
    """The rehearsal as a JSON-ready dict. ``peak_gb`` and the waits are maxima over the ranks."""
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
    return {
        "rank": result.rank,
        "place": result.place,
        "error": result.error,
        "peak_gb": {phase: peak.size / GB for phase, peak in result.gpu.items()},
        "needed_gb": {phase: needed(result, phase, job) / GB for phase in result.gpu},
        "kinds_gb": _kinds(result.gpu),
        "host_gb": {phase: peak.size / GB for phase, peak in result.host.items()},
        "host_kinds_gb": _kinds(result.host),
        "largest": [vars(tensor) for tensor in result.largest],
        "tflop": {phase: flops / 1e12 for phase, flops in result.flops.items()},
        "model_tflop": model_flops(result, job) / 1e12,
        "host_waits_per_update": sum(result.update_waits().values()),
        "host_waits": [{**wait._asdict(), "count": n} for wait, n in sorted(result.waits.items())],
        "guessed_values": [{**wait._asdict(), "count": n} for wait, n in sorted(result.guesses.items())],
        "collectives": collectives(result),
        "seconds": result.seconds,
        "kernels": result.kernels,
    }


def _kinds(peaks: Mapping[str, Peak]) -> dict[str, dict[str, float]]:
    return {phase: {kind: size / GB for kind, size in peak.kinds.items()} for phase, peak in peaks.items()}


def collectives(result: RankResult) -> list[dict[str, Any]]:
    """A rank's collectives by phase, group and operation, with count and size in GB."""
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
    """Model FLOPs of this GPU: 6 N D / model-parallel size, with N active parameters and D tokens in the
    packs."""
    tokens = result.packs * job.run.batch.pack_tokens
    return 6.0 * active_parameters(job.shape) * tokens / job.parallel.model_size
