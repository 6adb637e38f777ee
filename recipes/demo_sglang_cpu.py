"""Recipe of the CPU demo with a real, unmodified SGLang server on the CPU.

    make sglang                                    # SGLang's own environment, once
    bapo train recipes/demo_sglang_cpu.py

The run starts one server, loads each weight version into it, and stops it. SGLang does not guarantee equal
tokens for equal seeds, so two runs differ.

Preset: `paper()`, as in demo_cpu.py.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import RunConfig, SglangConfig, load_recipe


def recipe() -> RunConfig:
    """Ten steps of the demo, sampled by one server."""
    run = load_recipe(Path(__file__).with_name("demo_cpu.py"), RunConfig)
    server = SglangConfig(servers=1)
    return replace(
        run, name="demo_sglang_cpu", steps=10, rollout=replace(run.rollout, engine="sglang", sglang=server)
    )
