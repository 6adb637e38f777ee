"""Real SGLang servers of hybrids (Gated DeltaNet beside attention) on a CPU, against transformers.

SGLang's own model code runs, on the stand-in's operators. What a server keeps of a prefix is then a state,
which no token can be taken back from: continued segments, and new weights, must not meet another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from .conftest import HYBRID, SHAPE, Servers, varied

pytestmark = pytest.mark.slow

CLOSE = 1e-5
LAYER_SHAPE: dict[str, Any] = {**HYBRID, "num_hidden_layers": 4, "full_attention_interval": 4}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "dense": lambda: Qwen3_5TextConfig(**LAYER_SHAPE),
    "experts": lambda: Qwen3_5MoeTextConfig(
        **LAYER_SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=16,
    ),
}


def save_hybrid(kind: str, folder: Path, seed: int) -> nn.Module:
    """A random hybrid in float32, saved in ``folder``. No norm, decay or convolution is as initialised."""
    torch.manual_seed(seed)
    model = varied(AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval())
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"full_attention_interval": 4}))
    return model


def log_probs(model: nn.Module, ids: list[int]) -> list[float]:
    """The log-prob of each token but the first, by transformers."""
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url + path, json.dumps(body).encode(), headers), timeout=300) as response:
        return json.loads(response.read())


def sampled(url: str, ids: list[int], tokens: int) -> tuple[list[int], list[float], int]:
    """Sampled tokens, their log-probs, and how many tokens of ``ids`` were in the cache."""
    parameters = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    answer = ask(url, "/generate", {"input_ids": ids, "sampling_params": parameters, "return_logprob": True})[
        "meta_info"
    ]
    found = answer["output_token_logprobs"]
    return [one[1] for one in found], [one[0] for one in found], answer["cached_tokens"]


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_of_a_prefix_are_those_of_the_weights(kind: str, servers: Servers, tmp_path: Path) -> None:
    """A segment that continues from a cached state, and the same prefix after new weights."""
    model, other = (save_hybrid(kind, tmp_path / str(seed), seed) for seed in range(2))
    server = servers.start(tmp_path / "0")
    server.wait_ready()
    prompt = torch.randint(0, SHAPE["vocab_size"], (80,)).tolist()  # more than a chunk of the kernels
    first, found, _ = sampled(server.url, prompt, 20)
    assert found == pytest.approx(log_probs(model, prompt + first)[-20:], abs=CLOSE)
    second, found, cached = sampled(server.url, prompt + first, 8)
    assert cached > len(prompt)
    assert found == pytest.approx(log_probs(model, prompt + first + second)[-8:], abs=CLOSE)

    answer = ask(server.url, "/update_weights_from_disk", {"model_path": str(tmp_path / "1")})
    assert answer["success"], answer["message"]
    third, found, cached = sampled(server.url, prompt + first, 8)
    assert cached == 0
    assert found == pytest.approx(log_probs(other, prompt + first + third)[-8:], abs=CLOSE)
