"""Recipe Qwen3-4B-Instruct-2507, 8k responses, on four 80 GB GPUs of a node with colocated servers.

The settings are those of qwen3_4b_8k.py, with their sources (the paper, arXiv 2510.18927, section 5.1, and
the model's card). Chosen here: the layout.

Preset: `paper()`, as in qwen3_4b_8k.py.

    bapo plan recipes/qwen3_4b_8k_four_gpus.py
    sbatch --ntasks-per-node=4 --gpus-per-node=4 slurm/colocated.sbatch \\
        recipes/qwen3_4b_8k_four_gpus.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """Half a node: TP 2, DP 2, and a server on each GPU."""
    run = load_recipe(Path(__file__).with_name("qwen3_4b_8k.py"), RunConfig)
    rollout = replace(run.rollout, sglang=replace(run.rollout.sglang, servers=4))
    return replace(run, name=Path(__file__).stem, parallel=replace(run.parallel, data=2), rollout=rollout)
