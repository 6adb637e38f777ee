"""Base recipe of `make gpu-study`: Qwen2.5-0.5B-Instruct on one 80 GB GPU, which samples and trains in turns.

Every arm sets its preset and staleness. A step has 32 prompts with 8 responses of up to 512 tokens; every arm
drops groups with equal rewards.

    bapo plan studies/gpu_study/recipe.py
    bapo rehearse studies/gpu_study/recipe.py
"""

from pathlib import Path

from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)

DATA = Path("runs/gpu_study/data")


def recipe() -> RunConfig:
    """The run that every arm varies: 40 steps at staleness 8."""
    return RunConfig(
        name="gpu_study",
        steps=40,
        model=ModelConfig(hf_path=Path("models/Qwen2.5-0.5B-Instruct")),
        data=DataConfig(path=DATA / "train/data.jsonl", max_prompt_tokens=512),
        parallel=ParallelConfig(offload=True),
        reward=RewardConfig(function="reasoning_gym"),
        rollout=RolloutConfig(
            prompts_per_step=32,
            group_size=8,
            temperature=1.0,
            max_response_tokens=512,
            engine="sglang",
            sglang=SglangConfig(servers=1, colocated=True, sync="ipc", memory_fraction=0.6),
        ),
        algorithm=AlgorithmConfig(reuse_epochs=2, updates_per_epoch=4),
        optimizer=OptimizerConfig(lr=2e-6, warmup_updates=0),
        batch=BatchConfig(pack_tokens=16384),
        evaluation=EvaluationConfig(every=40, suites=(str(DATA / "held_out/data.jsonl"),), samples=1),
        checkpoint=CheckpointConfig(every=20, keep_last=1),
        logging=LoggingConfig(tensorboard=False),
    )
