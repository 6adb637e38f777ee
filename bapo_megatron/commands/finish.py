"""End of a run: the Hugging Face export of the policy, and the printed summary.

Every rank calls ``finish`` after the last step. It waits for earlier exports; Preempted if the run is told to
stop meanwhile. Used by ``train.py``.
"""

from __future__ import annotations

from time import sleep

from bapo_megatron.commands.report.data import headline
from bapo_megatron.commands.report.metric_table import read_metrics
from bapo_megatron.hf.export import export_hf, keep_others
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.checkpointing import bring_policy_back
from bapo_megatron.trainer.flow_control import stop_if_preempted

_POLL_S = 1.0


def finish(run: Run) -> None:
    """Export the policy, print the summary, and wait for earlier exports and ``checkpoint.after_export``.

    Collective. Preempted if the run is asked to stop before the exports are done.
    """
    bring_policy_back(run)  # engines have the GPUs after the evaluation of the last step
    output = RunPaths(run.config.directory).export
    for kept in keep_others(output) if is_main() else ():
        print(f"what was no export of this version, or held other files, is kept as {kept}", flush=True)
    export_hf(run.policy.hf_weights(), run.config.model.hf_path, output)
    if run.recorder:
        run.recorder.export(run.config.steps, output)
        print(_summary(run), flush=True)
    # After the export: the user's command reads its folder.
    if run.exports and run.exports.after:
        run.exports.after.exported_last(is_new=run.has_work)
    wait_for_exports(run)


def wait_for_exports(run: Run) -> None:
    """Wait until no export and no ``after_export`` command runs; then delete old checkpoints. Collective.

    Preempted if the run is asked to stop meanwhile.
    """
    if not broadcast_from_main(run.exports.is_busy() if run.exports else False):
        return
    if run.exports:
        command = " and for checkpoint.after_export" if run.exports.after else ""
        print(f"waiting for the exports of earlier steps{command}", flush=True)
    while broadcast_from_main(run.exports.is_busy() if run.exports else False):
        stop_if_preempted(run, run.config.steps)
        sleep(_POLL_S)
        if run.exports:
            run.exports.poll()
    if run.exports:
        run.checkpoints.delete_old()  # only now: exports read their checkpoints


def _summary(run: Run) -> str:
    paths = RunPaths(run.config.directory)
    figures = headline(read_metrics(paths.metrics))
    first, last = (f"{figures[key] or 0.0:.2f}" for key in ("reward_first", "reward_last"))
    return (
        f"reward {first} -> {last} in {figures['steps']} steps, "
        f"{run.policy.version} updates\n"
        f"Hugging Face model: {paths.export}\n"
        f"plots: bapo report {paths.root}"
    )
