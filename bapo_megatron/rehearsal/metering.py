"""Metering of one rank: runs its rehearsal and turns the meter's records into a ``RankResult``.

An error of the program becomes the result's error; one of the set-up is raised. Used by ``layers.py`` and
``processes.py``.
"""

from __future__ import annotations

import traceback
from collections import Counter

from bapo_megatron.rehearsal.fake.ledger import Block, Ledger, kind_of, sizes_by_kind
from bapo_megatron.rehearsal.fake.waits import is_of_program, short_path
from bapo_megatron.rehearsal.rank import RankRehearsal
from bapo_megatron.rehearsal.records import LargeTensor, Peak, RankRequest, RankResult

_LARGEST = 10


def rehearse_rank(request: RankRequest, layers: str) -> RankResult:
    """Rehearse one rank in this process, which must do nothing else afterwards."""
    rehearsal = RankRehearsal(request)
    error = None
    try:
        rehearsal.run()
    except BaseException as found:
        if not hasattr(rehearsal, "meter"):
            raise  # the rehearsal itself cannot be set up
        error = describe(found, rehearsal.failed_in)
    return result_of(rehearsal, layers, error)


def result_of(rehearsal: RankRehearsal, layers: str, error: str | None) -> RankResult:
    """The result of a rehearsal, from its meter."""
    request, meter = rehearsal.request, rehearsal.meter
    gpu, highest = _peaks(meter.ledger, request.device)
    return RankResult(
        rank=request.rank,
        place=request.place,
        layers=layers,
        packs=request.packs,
        gpu=gpu,
        host=_peaks(meter.ledger, "cpu")[0],
        largest=_largest(highest),
        flops=dict(meter.flops_of),
        calls=meter.collectives.calls,
        waits=dict(meter.waits.waits),
        guesses=dict(meter.waits.guesses),
        seconds=rehearsal.seconds,
        kernels=meter.kernels,
        error=error,
    )


def describe(error: BaseException, phase: str) -> str:
    """Error text of a failed rank: phase, innermost line of the project and of its libraries, error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f"{short_path(frame.filename)}:{frame.lineno}"
        for frame in frames
        if is_of_program(frame.filename, frame.name)
    ]
    own = [line for line in lines if line.startswith("bapo_megatron/")] or lines or ["?"]
    below = f" (below it {lines[-1]})" if lines and lines[-1] != own[-1] else ""
    message = " ".join(str(error).split())[:400]
    return f"{phase}: {own[-1]}{below}: {type(error).__name__}: {message}"


def _peaks(ledger: Ledger, device: str) -> tuple[dict[str, Peak], list[Block]]:
    """Peak memory by phase, and the blocks that were allocated at the highest."""
    peaks: dict[str, Peak] = {}
    highest: list[Block] = []
    best = -1
    for phase in ledger.windows:
        size, blocks = ledger.peak(phase, device)
        peaks[phase] = Peak(size, dict(sizes_by_kind(blocks)))
        if size > best:
            best, highest = size, blocks
    return peaks, highest


def _largest(blocks: list[Block]) -> list[LargeTensor]:
    sizes: Counter[tuple[tuple[int, ...], str, str, str, str]] = Counter()
    counts: Counter[tuple[tuple[int, ...], str, str, str, str]] = Counter()
    for block in blocks:
        key = (block.shape, block.dtype, kind_of(block), block.module, block.line)
        sizes[key] += block.size
        counts[key] += 1
    return [LargeTensor(size, counts[key], *key) for key, size in sizes.most_common(_LARGEST)]
