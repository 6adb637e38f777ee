"""Recipe of the analysis run on four 80 GB GPUs of a node with colocated servers.

The settings are those of r1_distill_qwen_7b_8k.py, with their sources (arXiv 2510.18927, section 5.1); only
the layout differs. Other methods by flags, e.g. GRPO: `--algorithm.bounds.low-start 0.8
--algorithm.bounds.low-end 0.8 --algorithm.bounds.high-start 1.2 --algorithm.bounds.high-end 1.2`.

Preset: `paper()`, as in r1_distill_qwen_7b_8k.py.

    bapo plan recipes/r1_distill_qwen_7b_8k_four_gpus.py
    sbatch --ntasks-per-node=4 --gpus-per-node=4 slurm/colocated.sbatch \\
        recipes/r1_distill_qwen_7b_8k_four_gpus.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """Half a node: TP 4, and a server on each GPU."""
    run = load_recipe(Path(__file__).with_name("r1_distill_qwen_7b_8k.py"), RunConfig)
    rollout = replace(run.rollout, sglang=replace(run.rollout.sglang, servers=4))
    return replace(run, name=Path(__file__).stem, parallel=replace(run.parallel, data=1), rollout=rollout)
