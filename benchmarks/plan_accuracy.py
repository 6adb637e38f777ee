"""Benchmark of ``bapo plan``'s memory estimates against the allocations of small policies on a CPU.

    python -m benchmarks.plan_accuracy

Policies, layouts and method are those of tests/distributed/test_host_waits.py: weights, gradient buffers and
optimizer state as allocated; activations as the peak of all storages that autograd keeps for the decoder
layers. Writes benchmarks/results/plan_accuracy.md.
"""

from __future__ import annotations

import platform
import tempfile
from itertools import product
from pathlib import Path

import torch

from bapo_megatron.config import ParallelConfig
from benchmarks.common import no_options
from tests.support.measured import KINDS, PACKS, TOKENS, Case, compare, save_model

RESULTS = Path(__file__).parent / "results" / "plan_accuracy.md"
LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(tensor=2, sequence=True),
    ParallelConfig(pipeline=2),
    ParallelConfig(pipeline=2, virtual=2),
    ParallelConfig(data=2),
    ParallelConfig(tensor=2, pipeline=2, data=2, sequence=True),
)
MODES = ("none", "selective", "full")
MODELS = (("qwen2", "bfloat16"), ("qwen3", "float32"), ("qwen3_moe", "bfloat16"))


def main() -> None:
    """Measure every case and write the table."""
    no_options(__doc__)
    lines, worst = [], dict.fromkeys(KINDS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for (family, dtype), layout, mode in product(MODELS, LAYOUTS, MODES):
            model = save_model(family, Path(folder) / family)
            case = Case(family, dtype, mode, layout)
            for stage, predicted, measured in by_stage(case, model):
                lines.append(row(case, stage, predicted, measured))
                for kind in KINDS:
                    error = abs(predicted[kind] / measured[kind] - 1)
                    worst[kind] = max(worst[kind], error)
    RESULTS.write_text(document(lines, worst))
    print(RESULTS.read_text())


def by_stage(case: Case, model: Path) -> list[tuple[int, dict[str, float], dict[str, float]]]:
    """Stage, predicted and measured sizes of each pipeline stage's first rank."""
    pairs = compare(case, model)
    ranks = len(pairs) // case.parallel.pipeline
    return [(stage, *pairs[stage * ranks]) for stage in range(case.parallel.pipeline)]


def row(case: Case, stage: int, predicted: dict[str, float], measured: dict[str, float]) -> str:
    """Table row: kB predicted / measured."""
    p = case.parallel
    layout = f"TP {p.tensor}{' + SP' * p.sequence}, PP {p.pipeline} x {p.virtual}, DP {p.data or 1}"
    cells = [f"{predicted[kind] / 1e3:,.1f} / {measured[kind] / 1e3:,.1f}" for kind in KINDS]
    return f"| {case.family} {case.dtype} | {layout} | {case.recompute} | {stage} | {' | '.join(cells)} |"


def document(lines: list[str], worst: dict[str, float]) -> str:
    """Text of the result file."""
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in worst.items())
    machine = f"{platform.machine()}, torch {torch.__version__}"
    packs = f"{PACKS} packs of {TOKENS} tokens"
    return "\n".join(
        [
            "# Memory: what `bapo plan` predicts against what is allocated",
            "",
            "Command: `python -m benchmarks.plan_accuracy`",
            "",
            f"{machine}, gloo, the torch layer spec. Models of 8 layers, hidden",
            f"size 128; an update of {packs} on every replica. kB predicted / measured on the",
            "first rank of each stage; activations are the peak over the update.",
            "",
            f"Largest difference: {errors}.",
            "",
            f"| model | layout | recompute | stage | {' | '.join(KINDS)} |",
            "|---|---|---|---:|" + "---:|" * len(KINDS),
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
