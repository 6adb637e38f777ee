"""A pretrained chat model learns one-digit arithmetic on a CPU, off-policy, under BAPO's preset of the paper.

make demo-real
"""

from pathlib import Path

from bapo_megatron.algo.bounds import paper
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)


def recipe() -> RunConfig:
    """The run behind `make demo-real`."""
    return RunConfig(
        name="demo_real",
        steps=15,
        model=ModelConfig(hf_path=Path("models/SmolLM2-135M-Instruct"), dtype="float32"),
        data=DataConfig(path=Path("data/one_digit/train.jsonl"), max_prompt_tokens=48),
        reward=RewardConfig(function="reasoning_gym", workers=1),
        rollout=RolloutConfig(prompts_per_step=6, group_size=8, temperature=1.0, max_response_tokens=40),
        algorithm=AlgorithmConfig(bounds=paper(), advantage="grpo", reuse_epochs=2, updates_per_epoch=3),
        optimizer=OptimizerConfig(lr=2e-5, warmup_updates=4, decay="linear", weight_decay=0.0),
        batch=BatchConfig(pack_tokens=1024),
        evaluation=EvaluationConfig(every=15, suites=("data/one_digit/held_out.jsonl",), samples=2),
        checkpoint=CheckpointConfig(every=5, keep_last=1),
        logging=LoggingConfig(note=""),
    )
