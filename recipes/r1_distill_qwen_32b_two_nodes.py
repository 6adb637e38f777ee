"""Recipe R1-Distill-Qwen-32B, 32k responses, on two nodes of eight 80 GB GPUs: one trains, one samples.

The settings from the paper (arXiv 2510.18927) are in r1_distill_qwen_32b.py. Chosen here: TP 8 on one
node, optimizer state in host memory, which saves 49 GB per GPU, and recomputation of the MLPs. The training
node needs 1.0 TB of host memory: 393 GB for the state, the same again during a checkpoint, and buffers.

Preset: `paper(65_536)`, as in r1_distill_qwen_32b.py.

    bapo plan recipes/r1_distill_qwen_32b_two_nodes.py --engine-gpus 8
    BAPO_SERVERS_PER_NODE=2 BAPO_SERVER_GPUS=4 sbatch --nodes=1 : --nodes=1 slurm/train.sbatch \\
        recipes/r1_distill_qwen_32b_two_nodes.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import ParallelConfig, RunConfig, load_recipe


def recipe() -> RunConfig:
    """One training node: TP 8, the optimizer on the host."""
    run = load_recipe(Path(__file__).with_name("r1_distill_qwen_32b.py"), RunConfig)
    return replace(
        run,
        name=Path(__file__).stem,
        parallel=ParallelConfig(tensor=8, data=1, sequence=True),
        optimizer=replace(run.optimizer, device="cpu"),
        batch=replace(run.batch, recompute="selective"),
    )
