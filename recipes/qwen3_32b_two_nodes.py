"""Recipe Qwen3-32B, 32k responses, on two nodes of eight 80 GB GPUs: one trains, one samples.

The settings from the paper (arXiv 2510.18927, section 5.1) and from the model's card are in qwen3_32b.py.
Chosen here: TP 8 on one node, optimizer state in host memory, which saves 49 GB per GPU, and recomputation of
the MLPs. The training node needs 1.0 TB of host memory: 393 GB for the state, the same again during a
checkpoint, and buffers.

Preset: `paper(65_536)`, as in qwen3_32b.py.

    bapo plan recipes/qwen3_32b_two_nodes.py --engine-gpus 8
    BAPO_SERVERS_PER_NODE=2 BAPO_SERVER_GPUS=4 sbatch --nodes=1 : --nodes=1 slurm/train.sbatch \\
        recipes/qwen3_32b_two_nodes.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import ParallelConfig, RunConfig, load_recipe


def recipe() -> RunConfig:
    """One training node: TP 8, the optimizer on the host."""
    run = load_recipe(Path(__file__).with_name("qwen3_32b.py"), RunConfig)
    return replace(
        run,
        name=Path(__file__).stem,
        parallel=ParallelConfig(tensor=8, data=1, sequence=True),
        optimizer=replace(run.optimizer, device="cpu"),
        batch=replace(run.batch, recompute="selective"),
    )
