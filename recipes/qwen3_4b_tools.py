"""Recipe Qwen3-4B-Instruct-2507 with a Python tool, on one node of eight 80 GB GPUs with colocated servers.

It is qwen3_4b_8k.py with episodes as responses: the model writes `<tool_call>`s in its trained format and
receives their output. From the paper (arXiv 2510.18927) as there: GRPO advantages, the BAPO bounds, their
problems, learning rate 2e-6 and temperature 0.6 (section 5.1). The paper has no tools.

Chosen here, not in the paper: the tool and the following.

- `tool_call`: the prompts name the tool as the model's template would (prompts/qwen_python.txt). The template
  continues such episodes exactly, so nothing is rewritten (docs/environments.md#tokens).
- Six turns: five calls and an answer. A response that still calls ends there, unanswered and wrong, so that
  the model learns to finish. 8,192 tokens include tool outputs: five outputs of 2,000 characters of text
  leave the model half of them.
- Sampling and training in turns. All 1,024 responses of a step are open in parallel, and the servers have
  places for all of them. A response that waits for a tool leaves its place empty: a tenth of the time, with
  calls of one second and turns of ten.
- Eight processes of 32 calls each: a call is a sandbox, and a core starts about 20 per second
  (docs/environments.md#shipped-tools). They run on rank 0's machine and need its cores.

Preset: `paper()`, as in qwen3_4b_8k.py. Wrong responses with repeated calls are longer than right ones: where
positive tokens have less than the target, a bound moves.

    bapo data prepare Skywork/Skywork-OR1-RL-Data --split math --output data/skywork_python \
        --tokenizer models/Qwen3-4B-Instruct-2507 --system-prompt "$(cat recipes/prompts/qwen_python.txt)"
    bapo plan recipes/qwen3_4b_tools.py
    sbatch slurm/colocated.sbatch recipes/qwen3_4b_tools.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import DataConfig, EnvironmentConfig, RunConfig, load_recipe


def recipe() -> RunConfig:
    """The single-turn run, with an environment and prompts that name it."""
    run = load_recipe(Path(__file__).with_name("qwen3_4b_8k.py"), RunConfig)
    return replace(
        run,
        name="qwen3_4b_tools",
        data=DataConfig(path=Path("data/skywork_python/data.jsonl")),
        environment=EnvironmentConfig(
            function="bapo_megatron.environment.tools.python_tool:PythonTool",
            settings={"format": "tool_call", "most_characters": 2000},
            max_turns=6,
            workers=8,
        ),
    )
