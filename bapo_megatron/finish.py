"""What a run does after its last step: the Hugging Face folder, and its result in figures."""

from __future__ import annotations

from bapo_megatron.build import Run
from bapo_megatron.report import headline
from bapo_megatron.state.export import export_hf
from bapo_megatron.state.logs import read_jsonl


def finish(run: Run) -> None:
    """Export the policy and say on rank 0 what came of the run. Collective."""
    output = run.config.directory / "export"
    export_hf(run.policy.hf_weights(), run.config.model.hf_path, output)
    if run.recorder:
        run.recorder.export(run.config.steps, output)
        print(_summary(run))


def _summary(run: Run) -> str:
    directory = run.config.directory
    figures = headline(read_jsonl(directory / "metrics.jsonl"))
    first, last = (f"{figures[key] or 0.0:.2f}" for key in ("reward_first", "reward_last"))
    return (
        f"reward {first} -> {last} in {run.config.steps} steps, "
        f"{run.policy.version} updates\n"
        f"Hugging Face model: {directory / 'export'}\n"
        f"plots: bapo report {directory}"
    )
