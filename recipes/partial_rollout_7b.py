"""Recipe R1-Distill-Qwen-7B with partial rollout: Fig. 12 of the paper.

From the paper (section 5.3): a rollout that exceeds a fixed token budget is stored unfinished and resumed
in later iterations, so parts of one response come from several policies; BAPO against GRPO. Model, data and
other settings are those of the analysis runs (section 5.1).

Chosen here, not in the paper: the budget (2,048 tokens of a response per weight version, a quarter of the
longest), the maximum age of a response (4 steps), and one pass over each batch, so that all staleness comes
from the rollouts. Sampling continues while the policy trains: four of a node's eight GPUs train, four sample.

Preset: `paper()`, as in r1_distill_qwen_7b_8k.py.

GRPO, the figure's baseline: `--algorithm.bounds.low-start 0.8 --algorithm.bounds.low-end 0.8
--algorithm.bounds.high-start 1.2 --algorithm.bounds.high-end 1.2 --run-dir runs/partial_rollout_grpo`.

    bapo plan recipes/partial_rollout_7b.py
    sbatch --ntasks-per-node=4 slurm/colocated.sbatch recipes/partial_rollout_7b.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import ParallelConfig, RunConfig, SglangConfig, load_recipe


def recipe() -> RunConfig:
    """The analysis run with staleness from segments, not reuse: GPUs 0 to 3 train, 4 to 7 sample."""
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
