"""Recipe of the demo with a hybrid model: a small Qwen3.5 learns sums on a CPU.

The policy has 0.26 M parameters; two of its four layers have full attention, the others Gated DeltaNet. A
supervised warm start (demo/warm_start.py) taught it the two habits of demo_cpu.py's policy.

Chosen here: 12 steps; the rest is that of demo_cpu.py. With `--rollout.engine sglang --rollout.sglang.servers
1` a real SGLang server samples, on the CPU (`make sglang`).

Preset: `paper()`, as in demo_cpu.py.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import RunConfig, load_recipe

HERE = Path(__file__).parent
NOTE = (
    "A demonstration that a hybrid of Gated DeltaNet and attention trains, on a made-up task. It shows "
    "nothing of large models, of real problems, or of how BAPO compares with other methods."
)


def recipe() -> RunConfig:
    """The run behind `make demo-hybrid`."""
    run = load_recipe(HERE / "demo_cpu.py", RunConfig)
    return replace(
        run,
        name=Path(__file__).stem,
        steps=12,
        model=replace(run.model, hf_path=HERE / "demo/policy_hybrid"),
        evaluation=replace(run.evaluation, every=12),
        checkpoint=replace(run.checkpoint, every=6),
        logging=replace(run.logging, note=NOTE),
    )
