"""Recipe Qwen3-30B-A3B, 16k responses, on two nodes of eight 80 GB GPUs: one trains, one samples.

The settings from the paper (arXiv 2510.18927, section 5.1) and from the model's card are in qwen3_30b_a3b.py.
Chosen here: TP 4 and two replicas on one node, EP 8, and optimizer state in host memory: 366 GB, the same
again during a checkpoint, and buffers: 0.9 TB in all.

Preset: `paper(32_768)`, as in qwen3_30b_a3b.py.

    bapo plan recipes/qwen3_30b_a3b_two_nodes.py --engine-gpus 8
    BAPO_SERVERS_PER_NODE=4 BAPO_SERVER_GPUS=2 sbatch --nodes=1 : --nodes=1 slurm/train.sbatch \\
        recipes/qwen3_30b_a3b_two_nodes.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import ParallelConfig, RunConfig, load_recipe


def recipe() -> RunConfig:
    """One training node: TP 4, the experts over its eight GPUs, the optimizer on the host."""
    run = load_recipe(Path(__file__).with_name("qwen3_30b_a3b.py"), RunConfig)
    return replace(
        run,
        name=Path(__file__).stem,
        parallel=ParallelConfig(tensor=4, data=2, sequence=True, expert=8),
        optimizer=replace(run.optimizer, device="cpu"),
    )
