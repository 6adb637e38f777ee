"""Accounts of all sampled tokens: the journal as the package reads it, held against an audit of its bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bapo_megatron.config import RolloutConfig
from bapo_megatron.data.prompts import load_prompts
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_batches import step_groups, steps_in
from bapo_megatron.rollout.sampler.write_ahead_log import Record, read_records
from bapo_megatron.types import Prompt
from tests.support.audit import Audit, audit


def state_of(journal: Path, prompts: Sequence[Prompt], group_size: int) -> SamplerState:
    """The sampler's state that the package replays from the journal."""
    sampler_state = SamplerState(prompts, group_size)
    for path in sorted(journal.glob("segments-*.log")):
        for record in read_records(path):
            if isinstance(record, Record):
                sampler_state.apply(record)
    for step in steps_in(journal):
        if step > sampler_state.served:  # killed between the step's file and the record of it
            sampler_state.apply(Record("batch", {"step": step, "groups": step_groups(journal, step)}, {}))
    return sampler_state


def check_accounts(
    logs: Path, journal: Path, config: RolloutConfig, prompts: Sequence[Prompt], cut_steps: bool = False
) -> Audit:
    """Check that nothing is lost, nothing counted twice, every rule kept, and the package's state agrees.

    ``logs``: a folder with all logs of the journal, also those that it has deleted.
    """
    found = audit(logs, journal, config, prompts, cut_steps)
    check_state(state_of(journal, prompts, config.group_size), found)
    return found


def check_state(sampler_state: SamplerState, found: Audit) -> None:
    """Check that the state, from the logs that the journal has left, agrees with an audit of all of them."""
    ours = found.totals()
    assert +sampler_state.tokens == +found.tokens
    assert sampler_state.outstanding_tokens == ours["kept"]
    assert (sampler_state.next_number, sampler_state.taken) == (len(found.groups), found.taken)
    assert (sampler_state.served, sampler_state.weights_step) == (found.served, found.weights_step)
    live = found.live
    assert {*sampler_state.open, *sampler_state.finished} == live.keys()
    assert sampler_state.finished.keys() == {number for number, group in live.items() if group.rewards}
    for number, group in live.items():
        one = sampler_state.open.get(number) or sampler_state.finished[number]
        assert ((one.epoch, one.index), one.tokens) == (group.place, group.tokens)


def check_run(run_dir: Path, kept: Path, cut_steps: bool = False) -> Audit:
    """``check_accounts`` of a run of the command line, by its own settings. ``kept``: all of its logs."""
    stored = json.loads((run_dir / "config.json").read_text())["config"]
    names = {field.name for field in fields(RolloutConfig)} - {"sglang", "replay"}
    config = RolloutConfig(**{name: stored[f"rollout.{name}"] for name in names})
    tokenizer = load_tokenizer(Path(stored["model.hf_path"]))
    files = [one["path"] for one in stored["data.sources"]] or [stored["data.path"]]
    found = [load_prompts(Path(file), tokenizer, stored["data.max_prompt_tokens"]).prompts for file in files]
    prompts = [prompt for of_file in found for prompt in of_file]
    return check_accounts(kept, run_dir / "journal", config, prompts, cut_steps)
