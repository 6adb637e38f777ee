"""The supervised warm start of the demo's policy: `bapo sft recipes/demo/warm_start.py`.

`python recipes/demo/make_task.py --out recipes/demo` makes its inputs: the tokenizer and random model in
`model/`, and `train.jsonl` with solutions. The result, `policy/`, is part of the repository.
"""

from pathlib import Path

from bapo_megatron.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, SftConfig

HERE = Path(__file__).parent


def recipe() -> SftConfig:
    """Stops early on purpose: the policy must know the form, and leave something to learn."""
    return SftConfig(
        model=ModelConfig(hf_path=HERE / "model", dtype="float32"),
        data=DataConfig(path=HERE / "train.jsonl", max_prompt_tokens=48),
        output=HERE / "policy",
        updates=400,
        samples_per_update=64,
        optimizer=OptimizerConfig(lr=2e-3, warmup_updates=40, decay="cosine", min_lr=1e-4),
        batch=BatchConfig(pack_tokens=4096),
    )
