r"""SFT recipe of the demo's policy (its supervised warm start): `bapo sft recipes/demo/warm_start.py`.

`python recipes/demo/make_task.py --out recipes/demo` makes its inputs: the tokenizer and random model in
`model/`, and `warm_start.jsonl` with solutions. The result, `policy/`, is in the repository as the policy of
tests. It guesses or adds digit by digit. The demo trains `policy_rambles/`, whose wrong responses are long:

    python recipes/demo/make_task.py --out runs/demo_task --guesses 0 --rambles 0.7 --attempts 2 4
    bapo sft recipes/demo/warm_start.py --model.hf-path runs/demo_task/model \
        --data.path runs/demo_task/warm_start.jsonl --output recipes/demo/policy_rambles

`policy_moe/`, of demo_moe_cpu.py, has the same habits and eight experts per layer: the same two commands,
with `--experts 8` in the first, `--updates 700` and its own `--output` in the second. `policy_hybrid/`, of
demo_hybrid_cpu.py: `--hybrid` in the first, `--updates 1400` in the second.
"""

from pathlib import Path

from bapo_megatron.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, SftConfig

HERE = Path(__file__).parent


def recipe() -> SftConfig:
    """Warm start of a few minutes on two cores."""
    return SftConfig(
        model=ModelConfig(hf_path=HERE / "model", dtype="float32"),
        data=DataConfig(path=HERE / "warm_start.jsonl", max_prompt_tokens=48),
        output=HERE / "policy",
        updates=1000,
        samples_per_update=64,
        optimizer=OptimizerConfig(lr=2e-3, warmup_updates=40, decay="cosine", min_lr=1e-4),
        batch=BatchConfig(pack_tokens=4096),
    )
