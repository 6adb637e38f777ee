"""Recipe R1-Distill-Qwen-7B with partial rollout: Fig. 12 of the paper.

From the paper (section 5.3): a rollout that exceeds a fixed token budget is stored unfinished and resumed
in later iterations, so parts of one response come from several policies; BAPO against GRPO. Model, data and
the rest as in the analysis runs (section 5.1).

Chosen here, not in the paper: the budget (2,048 tokens of a response under one version of the weights, a
quarter of the longest), how old a response may become (4 steps), and that each batch is used once, so that
all staleness comes from the rollouts. Sampling continues while the policy trains, so each has GPUs of its
own: of a node's eight four train and four sample.

Preset: `paper()`, as of r1_distill_qwen_7b_8k.py.

GRPO, the figure's baseline: `--algorithm.bounds.low-start 0.8 --algorithm.bounds.low-end 0.8
--algorithm.bounds.high-start 1.2 --algorithm.bounds.high-end 1.2 --run-dir runs/partial_rollout_grpo`.

    bapo plan recipes/partial_rollout_7b.py
    sbatch --ntasks-per-node=4 slurm/colocated.sbatch recipes/partial_rollout_7b.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import ParallelConfig, RunConfig, SglangConfig, load_recipe


def recipe() -> RunConfig:
    """The analysis run, its staleness from segments instead of reuse: GPUs 0 to 3 train, 4 to 7 sample."""
    run = load_recipe(Path(__file__).with_name("r1_distill_qwen_7b_8k.py"), RunConfig)
    return replace(
        run,
        name="partial_rollout_7b",
        parallel=ParallelConfig(tensor=4, sequence=True),
        rollout=replace(
            run.rollout, budget_tokens=2048, max_staleness=4, sglang=SglangConfig(servers=4, first_gpu=4)
        ),
        algorithm=replace(run.algorithm, reuse_epochs=1),
    )
