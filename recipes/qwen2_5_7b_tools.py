"""Recipe Qwen2.5-7B-Instruct with a Python tool, sampled while it trains, on one node of eight 80 GB GPUs.

From the paper (arXiv 2510.18927, section 5.1): GRPO advantages, the BAPO bounds, their problems, learning
rate 2e-6 and temperature 0.6, responses of up to 8k tokens. The paper has no tools, and another 7B.

Chosen here, not in the paper: the model, the tool, and all that follows.

- `tool_call`: the prompts name the tool as the model's own template would (prompts/qwen_python.txt), which
  continues such episodes exactly. The model's context is 32k tokens: a response may have 30k of them.
- Six turns, five calls and an answer; a response that still calls ends there, wrong. Five outputs of 2,000
  characters of text leave the model half of its 8,192 tokens.
- Four GPUs sample while four train, up to three steps ahead (`max_staleness`): a slow call delays its own
  response, and no update. Up to 3,072 responses may be open while a step trains, and by the plan the servers
  run 1,024 at a time: they stay full while calls take up to 1.4 times as long as turns
  (docs/environments.md#scale-and-limits).
- At most 2,048 tokens of a response under the weights of one step (`budget_tokens`): a long episode is put
  down, in the middle of a turn or of a call, and taken up again under newer weights. In four steps it reaches
  its 8,192 tokens, the longest. What its tools said stays as it was.
- Each batch is used once: all staleness comes from the rollouts, and the bounds act on that.
- Eight processes of 32 calls each, on rank 0's machine (docs/environments.md#shipped-tools).

Groups of equal rewards are dropped and others sampled (dynamic sampling), at most three times the prompts of
a step in all. A response cut at its limit is scored as it stands, wrong without a box, and trained on.

Preset: `paper()`, as of the other 7B recipes: no study here prefers another.

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
    """GPUs 0 to 3 train, TP 4; 4 to 7 sample, a server each."""
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
        batch=BatchConfig(pack_tokens=10240),  # the longest prompt and response together
    )
