"""Recipe of the demo with experts: a small Qwen3 MoE learns sums on a CPU, its experts spread over two ranks.

The policy has 0.48 M parameters, with 8 experts in each of four layers, two per token. A supervised warm
start (demo/warm_start.py) taught it the two habits of demo_cpu.py's policy. Each of two data-parallel ranks
has four experts per layer (EP 2), and they exchange the tokens of their experts.

Chosen here: 12 steps; the rest is that of demo_cpu.py. Engine and trainer route each token independently,
both in float32.

Preset: `paper()`, as in demo_cpu.py.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import ParallelConfig, RunConfig, load_recipe

HERE = Path(__file__).parent
NOTE = (
    "A demonstration that a mixture of experts trains at expert parallelism, on a made-up task. It shows "
    "nothing of large models, of real problems, or of how BAPO compares with other methods."
)


def recipe() -> RunConfig:
    """The run behind `make demo-moe`."""
    run = load_recipe(HERE / "demo_cpu.py", RunConfig)
    return replace(
        run,
        name=Path(__file__).stem,
        steps=12,
        model=replace(run.model, hf_path=HERE / "demo/policy_moe"),
        parallel=ParallelConfig(data=2, expert=2),
        evaluation=replace(run.evaluation, every=12),
        checkpoint=replace(run.checkpoint, every=6),
        logging=replace(run.logging, note=NOTE),
    )
