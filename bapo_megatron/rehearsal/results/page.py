"""Text page of a rehearsal: memory, FLOPs, collectives and host waits of each rank, and the verdict.

It only formats results. Used by ``commands/rehearse.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bapo_megatron.commands.plan.hardware import GB
from bapo_megatron.commands.plan.job import Job
from bapo_megatron.commands.plan.table import layout_name
from bapo_megatron.rehearsal.records import OFFLOADED, SAMPLE, UPDATE, RankResult
from bapo_megatron.rehearsal.results.summary import collectives, model_flops
from bapo_megatron.rehearsal.results.verdict import misfits, needed, node_bytes, server_bytes

_KINDS = ("weights", "gradients", "optimizer", "activations", "communication", "passing")
_MOST_LINES = 40


def page_text(results: Sequence[RankResult], job: Job, notes: Sequence[str] = ()) -> str:
    """The whole page. ``notes`` are lines of the verdict beside the limits of memory."""
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
        _memory(result, job),
        _largest(result),
        _flops(result, job),
        _collectives(result),
        _waits(result),
    ]
    return [head, *(line for block in blocks for line in ("", *block))]


def _memory(result: RankResult, job: Job) -> Iterator[str]:
    header = "".join(f"{kind:>14}" for kind in _KINDS)
    yield f"{'peak memory of the GPU, GB':28}{'total':>9}{'+ reserve':>11}{header}{'host':>9}"
    for phase, peak in result.gpu.items():
        kinds = "".join(f"{peak.kinds.get(kind, 0) / GB:14.2f}" for kind in _KINDS)
        host = result.host[phase].size / GB
        need = needed(result, phase, job) / GB
        yield (f"  {phase:26}{peak.size / GB:9.2f}{need:11.2f}{kinds}{host:9.2f}")
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
    for one in result.largest:
        count = f"{one.count} x " if one.count > 1 else ""
        shape = f"{count}{list(one.shape)} {one.dtype}"
        yield f"  {one.size / GB:8.2f} GB  {shape:42} {one.kind:14} {one.module or '-'}  {one.line}"


def _flops(result: RankResult, job: Job) -> Iterator[str]:
    model = model_flops(result, job)
    yield f"FLOPs; 6 N D is {model / 1e12:.1f} TFLOP a GPU"
    for phase, flops in result.flops.items():
        yield f"  {phase:26}{flops / 1e12:9.1f} TFLOP  {flops / model:6.2f} of 6 N D"


def _collectives(result: RankResult) -> Iterator[str]:
    yield "collectives by phase and group: calls, bytes of the whole message"
    for row in collectives(result):
        if row["ranks"] > 1 and not row["phase"].endswith(" 1"):  # the second update is like the first
            group = f"{row['group']} of {row['ranks']}"
            yield f"  {row['phase']:20}{group:16}{row['op']:16}{row['count']:8,}{row['gb']:12.3f} GB"


def _waits(result: RankResult) -> Iterator[str]:
    found = Counter[tuple[str, str]]()
    for wait, count in result.update_waits().items():
        found[wait.line, wait.what] += count
    yield f"the host waits for the GPU {found.total():,} times in an update with its search"
    for (line, what), count in found.most_common(_MOST_LINES):
        yield f"  {count:8,}  {what:20}{line}"
    if len(found) > _MOST_LINES:
        yield f"  and {len(found) - _MOST_LINES} more lines (--json has them)"


def _verdict(results: Sequence[RankResult], job: Job, notes: Sequence[str]) -> list[str]:
    host = f"a node's host: {node_bytes(results, job) / GB:.0f} GB at most, in a save or a load"
    problems = [*misfits(results, job), *notes]
    return [host, *(f"DOES NOT FIT: {line}" for line in problems)] if problems else [host, "FITS"]
