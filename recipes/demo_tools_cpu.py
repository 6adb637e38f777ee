"""Recipe of the demo with a tool: the small policy of demo_cpu.py learns to use a calculator, in minutes.

A supervised warm start (demo/make_tools.py) taught it three habits: call the calculator and box its answer,
which is right; call it with another sum, which is wrong; and guess, which is rarely right. A response is an
episode of up to three turns: ``755+180``, the calculator's ``935``, which is not trained on, and
``\\boxed{935}``, which the reward judges. Reward rises as guesses and slips are unlearnt.

Preset: `paper()`, the default (docs/algorithm.md). The task was built for these properties:
docs/environments.md.
"""

from pathlib import Path

from bapo_megatron.algo.bapo import paper
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
)

HERE = Path(__file__).parent / "demo"

NOTE = (
    "A demonstration on a made-up task: the policy was taught to ask a calculator, often badly, or to guess. "
    "It shows that responses over several turns train. It shows nothing of large models, or of tools that a "
    "model does not know yet."
)


def recipe() -> RunConfig:
    """The run behind `make demo-tools`."""
    return RunConfig(
        name="demo_tools_cpu",
        steps=10,
        model=ModelConfig(hf_path=HERE / "policy_tools", dtype="float32"),
        data=DataConfig(path=HERE / "train.jsonl", max_prompt_tokens=48),
        rollout=RolloutConfig(prompts_per_step=16, group_size=16, temperature=1.0, max_response_tokens=96),
        environment=EnvironmentConfig(
            function="bapo_megatron.environment.tools.calculator:Calculator",
            settings={"format": "plain"},
            max_turns=3,
            workers=1,
        ),
        algorithm=AlgorithmConfig(bounds=paper(), advantage="grpo", reuse_epochs=2, updates_per_epoch=4),
        optimizer=OptimizerConfig(lr=1e-4, warmup_updates=16, weight_decay=0.0, beta2=0.99),
        batch=BatchConfig(pack_tokens=4096),
        evaluation=EvaluationConfig(every=5, suites=(str(HERE / "eval.jsonl"),), samples=1),
        checkpoint=CheckpointConfig(every=5, keep_last=2),
        logging=LoggingConfig(note=NOTE),
    )
