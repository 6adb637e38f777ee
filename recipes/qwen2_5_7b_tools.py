"""Recipe Qwen2.5-7B-Instruct with a Python tool, sampled while it trains, on one node of eight 80 GB GPUs.

From the paper (arXiv 2510.18927, section 5.1): GRPO advantages, the BAPO bounds, their problems, learning
rate 2e-6 and temperature 0.6, responses of up to 8k tokens. The paper has no tools, and another 7B.

Chosen here, not in the paper: the model, the tool, and the following.

- `tool_call`: the prompts name the tool as the model's template would (prompts/qwen_python.txt), which
  continues such episodes exactly. The model's context of 32k tokens allows responses of 30k.
- Six turns: five calls and an answer. A response that still calls ends there, wrong. Five outputs of 2,000
  characters of text leave the model half of its 8,192 tokens.
- Four GPUs sample while four train, up to three steps ahead (`max_staleness`): a slow call delays its own
  response, but no update. Up to 3,072 responses may be open while a step trains, and by the plan the servers
  run 1,024 at a time: they stay full while calls take up to 1.4 times as long as turns
  (docs/environments.md#scale-and-limits).
- At most 2,048 tokens of a response per step's weights (`budget_tokens`): a long episode pauses, even within
  a turn or a call, and resumes under newer weights. It reaches the maximum of 8,192 tokens in four steps. Its
  tool outputs stay unchanged.
- Each batch has one pass: all staleness comes from the rollouts, and the bounds act on it.
- Eight processes of 32 calls each, on rank 0's machine (docs/environments.md#shipped-tools).

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper()`, as in the other 7B recipes: no study here prefers another.

    bapo data prepare Skywork/Skywork-OR1-RL-Data --split math --output data/skywork_python \
        --tokenizer models/Qwen2.5-7B-Instruct --system-prompt "$(cat recipes/prompts/qwen_python.txt)"
    bapo plan recipes/qwen2_5_7b_tools.py
    sbatch --ntasks-per-node=4 slurm/colocated.sbatch recipes/qwen2_5_7b_tools.py
"""

from pathlib import Path

from bapo_megatron.algo.bapo import paper
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)


def recipe() -> RunConfig:
    """GPUs 0 to 3 train with TP 4; GPUs 4 to 7 have one server each."""
    return RunConfig(
        name="qwen2_5_7b_tools",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen2.5-7B-Instruct")),
        data=DataConfig(path=Path("data/skywork_python/data.jsonl")),
        parallel=ParallelConfig(tensor=4, sequence=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=8192,
            budget_tokens=2048,
            max_staleness=3,
            engine="sglang",
            sglang=SglangConfig(servers=4, first_gpu=4),
        ),
        environment=EnvironmentConfig(
            function="bapo_megatron.environment.tools.python_tool:PythonTool",
            settings={"format": "tool_call", "most_characters": 2000},
            max_turns=6,
            workers=8,
        ),
        algorithm=AlgorithmConfig(bounds=paper(), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=10240),  # longest prompt + longest response
    )
