"""The steps that were given their groups, as a new process finds them on disk."""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.pool import Report
from bapo_megatron.rollout.sampler.events import batched
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_batches import read_step, step_groups, step_path, steps_in
from bapo_megatron.rollout.sampler.write_ahead_log import Record
from bapo_megatron.runtime.run_paths import step_entries


class StepFiles:
    """The files of ``folder``. What cannot be read is put aside, and reported."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder, self._report = folder, report

    def missing(self, sampler_state: SamplerState, first_step: int) -> list[Record]:
        """Records that ``book`` lacks, because they are damaged or were never written.

        What a step's file holds belongs to it, and the steps before ``first_step`` have their groups.
        """
        missing, served = [], sampler_state.served
        for step in steps_in(self._folder):
            try:
                numbers = step_groups(self._folder, step)
            except ConfigError as error:
                if step > served:
                    self._lose(step, str(error))
                    break
                continue
            if step > served or sampler_state.knows(numbers):
                missing.append(batched(step, numbers))
                served = max(served, step)
        if served < first_step - 1:
            missing.append(batched(first_step - 1, []))
        return missing

    def delete(self, last: int) -> None:
        """Delete those of the steps up to ``last``, also what was put aside of them."""
        for suffix in (".npz", ".lost"):
            for (step, _), path in step_entries(self._folder, suffix):
                if step <= last:
                    path.unlink()

    def is_readable(self, step: int) -> bool:
        """Whether the file of ``step`` can be given again. If not, it and those after it are put aside."""
        try:
            read_step(self._folder, step)
        except ConfigError as error:
            self._lose(step, str(error))
            return False
        return True

    def _lose(self, step: int, why: str) -> None:
        self._report("step_lost", step=step, detail=f"{why}; it is sampled anew")
        for later in steps_in(self._folder):
            if later >= step:
                path = step_path(self._folder, later)
                path.rename(path.with_suffix(".lost"))
