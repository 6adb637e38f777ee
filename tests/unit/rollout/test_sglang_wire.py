"""SGLang's wire format: the encoding of requests, and the validation of answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf import weight_stream
from bapo_megatron.hf.weight_stream import write_shards
from bapo_megatron.rollout.engines.sglang.server_process import sglang_python
from bapo_megatron.rollout.engines.sglang.wire import BadReply, generate_payload, generation_of
from bapo_megatron.runtime import device
from bapo_megatron.types import GenerateRequest, SamplingParams
from tests.support.models import SingleWriter, save_tiny_model

REQUEST = GenerateRequest("r", np.array([1, 2], np.int32), SamplingParams(0.7, 3, (9,), seed=4))

# As SGLang 0.5.23 sends it, without the fields that nobody reads.
REPLY: dict[str, Any] = {
    "output_ids": [5, 6, 9],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 9},
        "weight_version": "8",
        "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None], [-0.25, 9, None]],
        "weight_versions": [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}],
    },
}


NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
"""SGLang's defaults, which change no distribution."""


def test_the_body_of_a_request() -> None:
    sent = json.loads(generate_payload(REQUEST, "x1"))
    assert sent["rid"] == "x1"
    assert sent["input_ids"] == [1, 2]
    assert sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "temperature": 0.7,
        "max_new_tokens": 3,
        "stop_token_ids": [9],
        "ignore_eos": False,
        "skip_special_tokens": False,
        **NEUTRAL,
    }
    unstopped = GenerateRequest("r", np.array([1]), SamplingParams(1.0, 3, ()))
    assert json.loads(generate_payload(unstopped, "x"))["sampling_params"]["ignore_eos"] is True


def changed(path: tuple[Any, ...], value: Any) -> Any:
    reply = copy.deepcopy(REPLY)
    place = reply
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return reply


META = "meta_info"


def tokens(*ids: int, reason: str = "stop") -> Any:
    reply = changed((META, "finish_reason", "type"), reason)
    reply["output_ids"] = [*ids]
    reply[META]["output_token_logprobs"] = [[-1.0, one, None] for one in ids]
    return reply


BAD: dict[str, tuple[Any, str]] = {
    "text": ("busy", "no generation"),
    "no meta_info": ({"output_ids": [5]}, "no generation"),
    "an unknown finish reason": (changed((META, "finish_reason", "type"), "tired"), "no generation"),
    "an unnumbered version": (changed((META, "weight_version"), "default"), "no generation"),
    "other tokens": (changed(("output_ids",), [5, 6, 8]), "other tokens"),
    "a positive log-prob": (changed((META, "output_token_logprobs", 0, 0), 0.5), "above 0"),
    "a log-prob that is none": (changed((META, "output_token_logprobs", 0, 0), None), "no"),
    "a token of no fields": (changed((META, "output_token_logprobs", 0), []), "no generation"),
    "a stop that was not asked for": (tokens(5, 6, 8), "stop token that was not asked for"),
    "too many tokens": (tokens(5, 6, 7, 9), "4 tokens where 3 were asked for"),
    "a length before the limit": (tokens(5, 6, reason="length"), "length after 2 of 3 tokens: .*room for 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_answers_are_refused(name: str) -> None:
    reply, says = BAD[name]
    with pytest.raises(BadReply, match=says):
        generation_of(REQUEST, json.dumps(reply).encode())


@pytest.mark.parametrize(
    ("family", "broken", "says"),
    [
        ("qwen2", lambda w: w[:-1], "1 weights are missing: model.norm.weight"),
        ("qwen2", lambda w: [*w, ("model.what", torch.zeros(1))], "the model has no weight model.w"),
        ("qwen2", lambda w: [(w[0][0], w[0][1][1:])], "weight lm_head.weight has shape"),
        ("qwen2", lambda w: [*w, w[0]], "weight lm_head.weight was given twice"),
        ("qwen3_tied", lambda w: [*w, ("lm_head.weight", 2 * w[0][1])], "lm_head.weight diff"),
    ],
)
def test_broken_weights_are_not_staged(
    family: str, broken: Callable[[Any], Any], says: str, tmp_path: Path
) -> None:
    model = save_tiny_model(family, tmp_path / "model")
    staging = SingleWriter(tmp_path / "staging", model)
    with pytest.raises(ValueError, match=says):
        staging.write(broken([*load_file(model / "model.safetensors").items()]), 5)
    assert not (tmp_path / "staging/v5").exists()


def test_shards_end_by_size_and_alignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "_SHARD_BYTES", 40)
    weights = {
        "a": torch.arange(5.0),  # 20 bytes
        "b": torch.arange(6.0).view(2, 3).T,  # 24: the file has 44 of at least 40
        "c": torch.arange(3.0).bfloat16(),  # 6
        "d": torch.tensor(7.0),  # not at byte 6
        "e": torch.arange(4.0).half(),
    }
    write_shards(weights.items(), tmp_path)
    found = [load_file(path) for path in sorted(tmp_path.iterdir())]
    assert [list(tensors) for tensors in found] == [["a", "b"], ["c"], ["d", "e"]]
    for tensors in found:
        for name, tensor in tensors.items():
            assert tensor.dtype == weights[name].dtype
            assert torch.equal(tensor, weights[name])
    assert [path.stat().st_size for path in sorted(tmp_path.iterdir())] == [
        8 + 2**18 + size for size in (44, 6, 12)
    ]


def test_weights_that_were_written_can_be_offloaded(tmp_path: Path) -> None:
    """Their storage can be resized: torch forbids it for one that numpy has seen."""
    weight = torch.arange(5.0)
    write_shards([("a", weight)], tmp_path)
    weight.untyped_storage().resize_(0)


def test_an_error_of_the_caller_leaves_no_whole_file(tmp_path: Path) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.arange(5.0)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        write_shards(weights(), tmp_path)
    [file] = tmp_path.iterdir()
    with pytest.raises(SafetensorError):
        load_file(file)


def test_shards_of_many_tensors(tmp_path: Path) -> None:
    """A header has room for a thousand tensors of long names."""
    names = [f"{n:0128d}" for n in range(1001)]
    write_shards(((name, torch.zeros(1, 1, 1, 1)) for name in names), tmp_path)
    first, second = (load_file(path) for path in sorted(tmp_path.iterdir()))
    assert len(first) == 1000
    assert list(second) == names[1000:]


def test_files_of_a_writer_have_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "_SHARD_BYTES", 4)
    weights = [(f"w{n}", torch.tensor(float(n))) for n in range(6)]
    written = write_shards(weights, tmp_path, writer=1, writers=2)
    names = {f"model-{number:05d}.safetensors": (f"w{number}",) for number in (1, 3, 5)}
    assert {name: tensors for name, (_, tensors) in written.items()} == names
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        name: size for name, (size, _) in written.items()
    }


def test_an_error_leaves_no_whole_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight b is of torch\.int64"):
        write_shards([("a", torch.ones(50)), ("b", torch.zeros(1, dtype=torch.int64))], tmp_path)
    [file] = tmp_path.iterdir()
    with pytest.raises(Exception, match=r"(?i)header"):
        load_file(file)


CPU, GPU = ".venv-sglang/bin/python", ".venv-cluster-sglang/bin/python"


@pytest.mark.parametrize(
    ("there", "has_gpu", "variables", "chosen"),
    [
        ([CPU, GPU], False, {}, CPU),
        ([CPU, GPU], True, {}, GPU),
        ([GPU], False, {}, GPU),  # as on a login node
        ([], True, {"BAPO_SGLANG_PYTHON": ""}, f"no interpreter at {GPU}.*: `make cluster`"),  # not set
        ([CPU], False, {"BAPO_SGLANG_PYTHON": "absent"}, "absent"),
    ],
)
def test_which_interpreter_starts_servers(
    there: list[str],
    has_gpu: bool,
    variables: dict[str, str],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BAPO_SGLANG_PYTHON", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "gpu_signs", lambda: iter(["/dev/nvidia0 exists"] * has_gpu))
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    if chosen in there:
        assert sglang_python() == tmp_path / chosen
    else:
        with pytest.raises(ConfigError, match=chosen):
            sglang_python()
