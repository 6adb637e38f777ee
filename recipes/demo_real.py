"""Recipe of the second CPU demo: a pretrained chat model learns a public task, off-policy, preset `paper`.

    make demo-real

The model is SmolLM2-135M-Instruct, a Llama, from a Python package (demo/smollm2.py). Problems and reward are
reasoning-gym's: one-digit sums, differences and products. 60 problems are held out; none of the 129 training
problems is among them, nor a held-out sum or product with swapped numbers.

At first the model rambles, or answers immediately and wrongly. It learns to write the equation with its
result, and to stop. Each batch has four updates (two passes of two). Wrong responses are longer than right
ones, so positive tokens often have less than BAPO's target of 0.4 of the gradient, and a bound moves. With
three seeds held-out accuracy rose from 24, 18 and 18 % to 73, 67 and 64 % (60 problems with two responses
each; intervals of 20 points), responses shrank from 25-33 to 11-19 tokens, and a bound moved in 7, 26 and 18
of 48 updates.

Preset: `paper()`, the default, which follows the paper's figures (docs/algorithm.md). An update here has
fewer tokens than a search may see, so it makes one search.

It does not show that BAPO learns this better than fixed bounds (docs/results.md), and nothing about long
responses. 60 problems with two responses each are also a small sample.
"""

from pathlib import Path

from bapo_megatron.algo.bapo import paper
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

DATA = Path("data/one_digit")

NOTE = (
    "A pretrained model of 135 M parameters and an easy public task, at which wrong responses are longer "
    "than right ones. It shows that the program trains a real model, and when bounds move. It does not show "
    "that BAPO beats GRPO or fixed bounds."
)


def recipe() -> RunConfig:
    """The run behind `make demo-real`."""
    return RunConfig(
        name="demo_real",
        steps=12,
        model=ModelConfig(hf_path=Path("models/SmolLM2-135M-Instruct"), dtype="float32"),
        data=DataConfig(path=DATA / "train/data.jsonl", max_prompt_tokens=48),
        reward=RewardConfig(function="reasoning_gym", workers=1),
        rollout=RolloutConfig(prompts_per_step=4, group_size=8, temperature=1.0, max_response_tokens=40),
        algorithm=AlgorithmConfig(bounds=paper(), advantage="grpo", reuse_epochs=2, updates_per_epoch=2),
        optimizer=OptimizerConfig(lr=3e-5, warmup_updates=4, decay="linear", weight_decay=0.0),
        batch=BatchConfig(pack_tokens=1024, hold_forwards=True),
        evaluation=EvaluationConfig(every=12, suites=(str(DATA / "held_out/data.jsonl"),), samples=2),
        checkpoint=CheckpointConfig(every=4, keep_last=1),
        logging=LoggingConfig(note=NOTE),
    )
