"""Recipe of the demo with a real model, SmolLM2-135M-Instruct, and an agent program that prompts it.

    make demo-agent

Model, problems, reward and settings are those of demo_real_tools.py. The agent (demo/agent.py) is a process
per episode: it uses OpenAI's chat completions with streams, is unaware of the training, and answers
expressions as a user. Its log of each episode is in logs/agents of the run.

After a value it drops the question of the worked example, which rewrites the history. So an episode with a
call is a tree of two branches, which the report shows; the second has its own prompt of 90 tokens, within
`max_response_tokens`.

One run, seed 0: in six steps the share of right answers to 60 held-out problems, two responses each, rose
from 35.8 % (95 % interval 25.0 to 46.7) to 98.3 % (95.8 to 100). `make demo-agent` took 14 minutes of
processor time.

Preset: `paper()`, as in demo_real_tools.py.
"""

import sys
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
    RewardConfig,
    RolloutConfig,
    RunConfig,
)

DATA = Path("data/calculator_agent")

NOTE = (
    "A pretrained model of 135 M parameters, asked by an agent program that knows nothing of the training. "
    "It shows how such a program's episodes are trained on. It does not show that BAPO beats GRPO or fixed "
    "bounds."
)


def recipe() -> RunConfig:
    """The run behind `make demo-agent`."""
    return RunConfig(
        name="demo_agent",
        steps=6,
        model=ModelConfig(hf_path=Path("models/SmolLM2-135M-Instruct"), dtype="float32"),
        data=DataConfig(path=DATA / "train.jsonl", max_prompt_tokens=128),
        reward=RewardConfig(function="reasoning_gym", workers=1),
        rollout=RolloutConfig(prompts_per_step=4, group_size=8, temperature=1.0, max_response_tokens=112),
        environment=EnvironmentConfig(
            function="bapo_megatron.environment.adapters.endpoint:EndpointEnvironment",
            settings={"command": [sys.executable, str(Path(__file__).parent / "demo/agent.py")]},
            max_turns=3,
            workers=1,
        ),
        algorithm=AlgorithmConfig(bounds=paper(), advantage="grpo", reuse_epochs=2, updates_per_epoch=2),
        optimizer=OptimizerConfig(lr=3e-5, warmup_updates=4, decay="linear", weight_decay=0.0),
        batch=BatchConfig(pack_tokens=1024, hold_forwards=True),
        evaluation=EvaluationConfig(every=6, suites=(str(DATA / "held_out.jsonl"),), samples=2),
        checkpoint=CheckpointConfig(every=3, keep_last=1),
        logging=LoggingConfig(note=NOTE),
    )
