"""A real SGLang server at its limits: full sequences, ends that config.json names, requests in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.rollout.engines.requests import ModelLimits, stop_token_ids
from bapo_megatron.rollout.engines.sglang.http_client import ServerError
from bapo_megatron.rollout.engines.sglang.server_process import server_flags

from .blocking import BlockingEngine
from .conftest import Servers, engine_on, start_server
from .references import TOLERANCE, interrupted, reference_log_probs, request

LONGEST = 1024
"""Tokens of prompt and response, all that the model has positions for."""
PROMPT = 24
END = 7
"""The end of sequence that config.json names, and no other file."""
MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> Path:
    folder = make_model("qwen2", max_position_embeddings=LONGEST, eos_token_id=END)
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def url(sglang: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the flags of a run that keeps requests in place."""
    run = load_recipe(Path(__file__).parents[2] / "recipes/demo_sglang_cpu.py", RunConfig)
    settings = replace(run.rollout.sglang, on_update="in_place", flags=("--skip-server-warmup",))
    config = replace(
        run,
        model=replace(run.model, hf_path=model, dtype="float32"),
        data=replace(run.data, max_prompt_tokens=PROMPT),
        rollout=replace(run.rollout, max_response_tokens=LONGEST - PROMPT, sglang=settings),
    )
    assert config.longest_request == LONGEST
    server = start_server(model, tmp_path_factory.mktemp("limits"), server_flags(config, cuda=False))
    try:
        server.wait_ready(600)
        yield server.url
    finally:
        server.stop(seconds=1)


@pytest.fixture
def start(url: str, model: Path, tmp_path: Path) -> Iterator[Callable[..., BlockingEngine]]:
    engines: list[BlockingEngine] = []

    def engine(limits: ModelLimits | None = None) -> BlockingEngine:
        engines.append(engine_on(url, model, tmp_path / "weights", "in_place", limits))
        return engines[-1]

    yield engine
    for one in engines:
        one.close()


@pytest.mark.slow
def test_a_sequence_may_fill_the_models_context(start: Callable[..., BlockingEngine]) -> None:
    whole = request("whole", range(PROMPT), new=LONGEST - PROMPT)
    last = request("last", np.arange(LONGEST - 1) % 40, new=1)
    answers = start().generate([whole, last])
    assert [len(answer.token_ids_R) for answer in answers] == [LONGEST - PROMPT, 1]
    assert [answer.finish_reason for answer in answers] == ["length", "length"]


@pytest.mark.slow
def test_a_response_ends_at_the_stop_tokens_of_config_json(
    start: Callable[..., BlockingEngine], model: Path
) -> None:
    """SGLang stops there, whatever a request asks for."""
    stops = stop_token_ids(model, type("Tokenizer", (), {"eos_token_id": 3}))
    assert stops == (3, END)
    engine = start()
    asked = [request(n, [n + 8, 5], new=300, temperature=1.0, stop=stops) for n in range(24)]
    answers = engine.generate(asked)
    ends = {int(answer.token_ids_R[-1]) for answer in answers if answer.finish_reason == "stop"}
    assert END in ends
    with pytest.raises(ServerError, match="a stop token that was not asked for"):
        engine.generate([replace(one, params=replace(one.params, stop_token_ids=(3,))) for one in asked])


@pytest.mark.slow
def test_in_place_tokens_carry_the_version_that_sampled_them(
    start: Callable[..., BlockingEngine], model: Path, tmp_path: Path
) -> None:
    """The new weights differ in the output layer alone: keys and values of old tokens are right for both."""
    other = tmp_path / "other"
    other.mkdir()
    changed = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    changed["lm_head.weight"] = -changed["lm_head.weight"]
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text((model / "config.json").read_text())
    original = load_file(model / "model.safetensors")

    def begin() -> BlockingEngine:
        engine = start()
        engine.update_weights(original.items(), engine.weight_version + 1)
        return engine

    def change(engine: BlockingEngine, _wait_s: float) -> None:
        engine.update_weights(changed.items(), engine.weight_version + 1)

    asked = [request(n, [n + 8, 5], new=900, temperature=1.0) for n in range(6)]
    engine, answers = interrupted(begin, asked, change, versions=2)
    version = engine.weight_version
    for one, answer in zip(asked, answers, strict=True):
        assert set(answer.versions_R.tolist()) <= {version - 1, version}
        old, new = (reference_log_probs(folder, one, answer) for folder in (model, other))
        expected = np.where(answer.versions_R == version, new, old)
        np.testing.assert_allclose(answer.log_probs_R, expected, atol=TOLERANCE, rtol=0)


def test_the_next_segment_hits_the_prefix_cache(servers: Servers, make_model: MakeModel) -> None:
    """All of it but the last token, which was sampled and not read. So segments return to their server."""
    url = servers.shared(make_model("qwen2")).url
    ids = list(range(20, 40))
    answer = _generate(url, ids, new=12)
    assert answer["meta_info"]["cached_tokens"] == 0
    whole = [*ids, *answer["output_ids"]]
    again = _generate(url, whole, new=1)
    assert again["meta_info"]["prompt_tokens"] == 32
    assert again["meta_info"]["cached_tokens"] == 31


def _generate(url: str, ids: list[int], new: int) -> dict[str, Any]:
    params = {"max_new_tokens": new, "ignore_eos": True, "temperature": 1.0}
    body = json.dumps({"input_ids": ids, "sampling_params": params, "return_logprob": True}).encode()
    with urlopen(
        Request(f"{url}/generate", body, {"Content-Type": "application/json"}), timeout=300
    ) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found
