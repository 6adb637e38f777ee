"""GPU check of each phase's peak memory against its rehearsal (``bapo rehearse``) on the same shape.

The rehearsal runs the same program on fake tensors, so only kernel workspaces should differ.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.errors import ConfigError
from bapo_megatron.planning.job import GB
from bapo_megatron.policy.device import uses_transformer_engine
from bapo_megatron.trainer.build import build_policy
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_rehearsal.te_sources import te_folder
from benchmarks.gpu.memory_and_speed import draw, save
from benchmarks.gpu.rows import Row, Size, commands_environment

LIMIT = 0.05
"""Relative difference of a phase's peak from the rehearsed one, in addition to SLACK_GB."""
SLACK_GB = 0.5
"""Workspaces of cuBLAS and cuDNN, which a rehearsal cannot see."""
ROOT = Path(__file__).parents[2]
_REHEARSAL_S = 300

_RECIPE = """\
from pathlib import Path

from bapo_megatron.config import (
    BatchConfig, DataConfig, EvaluationConfig, ModelConfig, RolloutConfig, RunConfig
)


def recipe() -> RunConfig:
    folder = Path(__file__).with_name("policy")
    return RunConfig(
        name="gpu-check",
        model=ModelConfig(folder, dtype="bfloat16"),
        data=DataConfig(folder, max_prompt_tokens=8),
        rollout=RolloutConfig(prompts_per_step=1, group_size=2, max_response_tokens={response}),
        batch=BatchConfig(pack_tokens={pack}),
    )
"""


def rows(size: Size, folder: Path) -> Iterator[Row]:
    """A row per phase that was both rehearsed and measured.

    ``folder`` has the policy of this size, unless the section that saves it was skipped.
    """
    recipe = folder / "phases.py"
    recipe.write_text(_RECIPE.format(pack=size.pack, response=size.pack - 8))
    try:
        layers = rehearsed_layers()
    except ConfigError as error:  # another version is allowed, only not rehearsed
        yield Row("rehearsal", f"not run: {error}"[:300])
        return
    if not (folder / "policy").exists():
        save(size, folder / "policy")
    rehearsed, said = rehearse(recipe, layers)
    if rehearsed is None:
        yield Row("rehearsal", said, "a page of figures", False if size.cuda else None)
        return
    if not size.cuda:
        for phase, peak in rehearsed.items():
            yield Row(phase, f"rehearsed {peak:.3f} GB; nothing to measure on a CPU")
        return
    for phase, peak in measured(size, load_recipe(recipe, RunConfig), folder):
        if phase in rehearsed:
            yield judged(phase, peak, rehearsed[phase], size.tiny)
        else:
            yield Row(phase, f"{peak:.2f} GB, not rehearsed: {said}", "rehearsed", False)


def judged(phase: str, peak: float, rehearsed: float, tiny: bool) -> Row:
    """Row of one phase, peaks in GB. At tiny size workspaces dominate, so it is reported, not checked."""
    ok = abs(peak - rehearsed) <= LIMIT * rehearsed + SLACK_GB
    limit = f"within {LIMIT:.0%} and {SLACK_GB} GB"
    return Row(phase, f"{peak:.2f} GB, rehearsed {rehearsed:.2f}", limit, None if tiny else ok)


def rehearsed_layers() -> str:
    """Layers of this machine. Raises ConfigError for a Transformer Engine that cannot be rehearsed."""
    layers = "te" if uses_transformer_engine(torch.bfloat16) else "torch"
    if layers == "te":
        te_folder()
    return layers


def rehearse(recipe: Path, layers: str) -> tuple[dict[str, float] | None, str]:
    """Rehearsed GB by phase, None after a failure; and the command's last line or the rank's error.

    The GPU is hidden, so that a CUDA build of torch behaves as on a login node: the rehearsal fakes its own.
    """
    output = recipe.with_suffix(".json")
    environment = {**commands_environment(), "CUDA_VISIBLE_DEVICES": ""}
    flags = ["--layers", layers, "--packs", "1", "--json", str(output)]
    command = [sys.executable, "-m", "bapo_megatron.cli", "rehearse", str(recipe), *flags]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_REHEARSAL_S
        )
    except subprocess.TimeoutExpired:
        return None, f"not done in {_REHEARSAL_S} s"
    last = ((done.stdout + done.stderr).strip() or "no output").splitlines()[-1]
    if not output.is_file():  # exit code 1 also writes it: the recipe does not fit
        return None, last[:200]
    summary = json.loads(output.read_text())
    errors = [rank["error"] for rank in summary.get("ranks", []) if rank["error"]]
    return summary["peak_gb"], (errors or [last])[0][:200]


def measured(size: Size, config: RunConfig, folder: Path) -> Iterator[tuple[str, float]]:
    """Phases by their rehearsal names, each with its peak of allocated memory in GB, as they end.

    Buffers that earlier sections keep are subtracted.
    """
    peaks: dict[str, float] = {}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / GB

    with phase("build"):
        policy = build_policy(config)
    yield "build", peaks["build"]
    packs = pack_samples(draw(size)[:1], size.pack, "token", policy.pack_layout)
    clipping = UpdateLoss(config.algorithm)
    for number in (1, 2):
        with phase(f"bounds search {number}"):
            loss: Any = clipping.loss(policy, packs, on_policy=False)
        with phase(f"update {number}"):
            policy.update(packs, loss)
        for name in (f"bounds search {number}", f"update {number}"):
            yield name, peaks[name]
    with phase("weight sync"):
        for _name, tensor in policy.hf_weights():
            del tensor
    yield "weight sync", peaks["weight sync"]
    with phase("save"):
        saving = policy.save(folder / "checkpoint")
        while not saving.is_written():
            time.sleep(0.05)  # leaves the cores to the writer
    yield "save", peaks["save"]
    saving.finish()
