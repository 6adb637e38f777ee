"""Recipe Qwen3-4B-Instruct-2507 with a Python tool, on one node of eight 80 GB GPUs with colocated servers.

It is qwen3_4b_8k.py, and its responses are episodes: the model writes `<tool_call>`s, the calls as it was
trained to write them, and is given what they print. From the paper (arXiv 2510.18927) as there: GRPO
advantages, the BAPO bounds, their problems, learning rate 2e-6 and temperature 0.6 (section 5.1). The paper
has no tools.

Chosen here, not in the paper: the tool and all that follows.

- `tool_call`: the prompts name the tool as the model's own template would (prompts/qwen_python.txt). Its
  template continues such episodes exactly, so nothing is rewritten (docs/environments.md#tokens).
- Six turns, five calls and an answer. A response that still calls ends there, unanswered and wrong, so that
  it learns to come to an end. 8,192 tokens are sampled and given ones together: five outputs of 2,000
  characters of text leave the model half of them.
- Sampling and training in turns. All 1,024 responses of a step are open at once, and the servers have places
  for all of them: one that waits for a tool leaves its place empty, with calls of a second and turns of ten
  a tenth of the time.
- Eight processes of 32 calls each: a call is a sandbox, of which a core starts about 20 a second
  (docs/environments.md#shipped-tools). They run on rank 0's machine and need its cores.

Preset: `paper()`, as of qwen3_4b_8k.py. Wrong responses that call again and again are longer than right ones:
where positive tokens hold less than the target, a bound moves.

    bapo data prepare Skywork/Skywork-OR1-RL-Data --split math --output data/skywork_python \
        --tokenizer models/Qwen3-4B-Instruct-2507 --system-prompt "$(cat recipes/prompts/qwen_python.txt)"
    bapo plan recipes/qwen3_4b_tools.py
    sbatch slurm/colocated.sbatch recipes/qwen3_4b_tools.py
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import DataConfig, EnvironmentConfig, RunConfig, load_recipe


def recipe() -> RunConfig:
    """The run of one turn, with an environment and the prompts that name it."""
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
