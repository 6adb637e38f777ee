"""The table of a response's per-token columns: the files' layout, and what a new column costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron import types
from bapo_megatron.data.samples import Sample
from bapo_megatron.rollout.sampler.events import Segment, groups_opened, segments_arrived
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.types import RESPONSE_COLUMNS, Generation, Prompt, ResponseTokens, Rollout

PROMPT = Prompt(0, np.array([1], np.int32), "", "test")


def answer(*ids: int, mask: list[bool] | None = None) -> Generation:
    zeros = np.zeros(len(ids))
    mask_R = None if mask is None else np.array(mask)
    ids_R = np.array(ids, np.int64)
    return Generation(ids_R, zeros, ids_R, loss_mask_R=mask_R, request_id="r", finish_reason="length")


def test_the_table_is_what_every_response_has() -> None:
    names = ["token_ids_R", "log_probs_R", "versions_R", "loss_mask_R", "routes_R", "teacher_log_probs_R"]
    assert list(RESPONSE_COLUMNS) == names
    assert all(hasattr(made, name) for name in names for made in (answer(1), answer(1).first(0)))
    assert set(names) <= set(Rollout.__dataclass_fields__)
    assert set(names[1:]) <= set(Sample.__dataclass_fields__)


def test_a_column_that_old_files_lack_must_be_optional() -> None:
    first = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}
    assert {c.array: c.dtype for c in RESPONSE_COLUMNS.values() if c.fill is None} == first


def test_the_logs_record_is_as_in_earlier_versions() -> None:
    """Names, order and dtypes of its arrays, and the rows: by hand."""
    state = SamplerState([PROMPT], 2)
    state.apply(groups_opened([(0, 0, 0)], 1))
    record = segments_arrived(
        [Segment(state.open[0], 1, 0, answer(5, 6), None), Segment(state.open[0], 0, 0, answer(7), "stop")]
    )
    assert record.fields == {"parts": [[0, 0, 0, 1, 0, 2, None], [0, 0, 0, 0, 0, 1, "stop"]]}
    assert [(name, array.dtype.str) for name, array in record.arrays.items()] == [
        ("token_ids", "<i4"),
        ("log_probs", "<f4"),
        ("versions", "<i4"),
    ]
    assert record.arrays["token_ids"].tolist() == [5, 6, 7]
    state.apply(record)
    assert [one.tokens for one in state.open[0].responses] == [1, 2]
    assert [one.is_complete for one in state.open[0].responses] == [True, False]


def test_a_mask_goes_through_the_log() -> None:
    state = SamplerState([PROMPT], 2)
    state.apply(groups_opened([(0, 0, 0)], 1))
    group = state.open[0]
    masked, plain = answer(5, 6, mask=[False, True]), answer(7)
    state.apply(segments_arrived([Segment(group, 0, 0, masked, None), Segment(group, 1, 0, plain, None)]))
    first, second = (one.so_far.loss_mask_R for one in group.responses)
    assert first is not None
    assert second is not None
    assert (first.tolist(), second.tolist()) == ([False, True], [True])


def test_a_file_without_a_needed_column_and_values_of_another_kind_are_refused() -> None:
    arrays = ResponseTokens.joined([answer(5)]).arrays
    del arrays["versions"]
    with pytest.raises(KeyError, match="versions"):
        next(ResponseTokens.split(arrays, [1]))
    wrong = ResponseTokens(np.array([0.5]), np.zeros(1), np.zeros(1, np.int32))
    with pytest.raises(TypeError, match=r"Cannot cast .*float64.* to .*int32"):
        ResponseTokens.joined([wrong])


def test_a_column_has_one_value_for_each_token() -> None:
    longer = answer(5, 6, mask=[True, True, False])
    with pytest.raises(ValueError, match="loss_mask_R has 4 values for 3 tokens; give one for each"):
        ResponseTokens.joined([longer, answer(7)])


PROGRAM = '''
import importlib.util, json, sys
from pathlib import Path

spec = importlib.util.find_spec("bapo_megatron.types")
types = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = types
place = "\\n\\n@dataclass(frozen=True)\\nclass ResponseTokens("
before, after = Path(spec.origin).read_text().split(place)
column = """    mark_R: Annotated[np.ndarray | None, ResponseColumn("marks", np.int16, fill=-1)] = field(
        default=None, kw_only=True
    )
"""
exec(compile(before + column + place + after, spec.origin, "exec"), types.__dict__)

import numpy as np
from bapo_megatron.data.samples import samples_of
from bapo_megatron.rollout.sampler import events
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_batches import read_header, read_step, write_step
from bapo_megatron.rollout.sampler.step_columns import StepColumns

state = SamplerState([types.Prompt(0, np.array([1], np.int32), "", "test")], 2)
state.apply(events.groups_opened([(0, 0, 0)], 1))
ids, zeros = np.array([5, 6], np.int32), np.zeros(2, np.float32)
for sample, start, mark in ((0, 0, [3, 4]), (0, 2, [7, 8]), (1, 0, None)):
    mark = None if mark is None else np.array(mark)
    answer = types.Generation(ids, zeros, ids, mark_R=mark, request_id="r", finish_reason="length")
    reason = "length" if start or sample else None
    state.apply(events.segments_arrived([events.Segment(state.open[0], sample, start, answer, reason)]))
state.apply(events.group_scored(0, [1.0, 0.0], []))
folder = Path(sys.argv[1])
write_step(folder, 1, types.StepBatch((state.finished[0].group,), {}))
[group] = read_step(folder, 1).groups
columns = StepColumns(read_header(folder, 1))
columns.open()
[samples] = samples_of(columns, "grpo")
print(json.dumps([one.mark_R.tolist() for one in (*group.rollouts, *(one.loaded() for one in samples))]))
'''


def test_a_new_column_is_one_field(tmp_path: Path) -> None:
    """Added to the table's source alone, it comes from an answer through log and step file to a sample."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == 2 * [[3, 4, 7, 8], [-1, -1]]
    with np.load(tmp_path / "step_000001.npz") as arrays:
        assert arrays["marks"].dtype == np.int16
    assert not hasattr(types.ResponseColumns, "mark_R")
