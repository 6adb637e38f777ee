"""Tiny random models in Hugging Face folders, one for each family, and the engines under contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_text_config
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.local_engine import LocalEngine, LocalModel
from bapo_megatron.rollout.engines.requests import ModelLimits, limits_of
from bapo_megatron.rollout.engines.sglang.authorization import Authorization
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, PauseMode, SglangServer
from bapo_megatron.rollout.engines.sglang.requirements import ROUTES, flag
from bapo_megatron.rollout.engines.sglang.server_process import (
    ServerProcess,
    server_command,
    server_environment,
    sglang_python,
)
from bapo_megatron.runtime.distributed import free_port
from tests.support.fake_sglang import Keyless

from .blocking import BlockingEngine

MAX_BATCH = 6
"""Small, so that most tests decode more requests than fit at a time."""

# Weights wide enough that distributions are far from uniform, and a wrong weight shows.
SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},  # no default, which hides a lost one
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

HYBRID: dict[str, Any] = {
    **SHAPE,
    "full_attention_interval": 2,  # not that of SGLang's and transformers' defaults
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 0.3,  # a tiny random model is ill-conditioned otherwise: a change of 1e-6 becomes 0.02
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 50000.0,
        "partial_rotary_factor": 0.5,  # nor this one, which transformers writes here alone
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
"""A tower that is not trained: no engine of a run loads it."""


def varied(model: nn.Module) -> nn.Module:
    """The hybrid with no norm, decay or convolution as it was initialised."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "conv1d" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _multimodal(**more: Any) -> Qwen3_5ForConditionalGeneration:
    config = Qwen3_5Config(text_config={**HYBRID, **more}, vision_config={**VISION, "out_hidden_size": 32})
    return Qwen3_5ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "tie_word_embeddings": False, **more})),
    "qwen2_tied": lambda **more: Qwen2ForCausalLM(
        Qwen2Config(**{**SHAPE, "tie_word_embeddings": True, **more})
    ),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 16, **more})),
    "qwen3_moe": lambda **more: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{
                **SHAPE,
                "head_dim": 16,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
                **more,
            }
        )
    ),
    "llama3": lambda **more: LlamaForCausalLM(
        LlamaConfig(**{**SHAPE, "rope_parameters": LLAMA3_ROPE, **more})
    ),
    "qwen3_5_text": lambda **more: varied(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**HYBRID, **more}))),
    "qwen3_5": lambda **more: varied(_multimodal(**more)),
}


@dataclass(frozen=True)
class EngineKind:
    """How to start an engine on a folder, and what it promises beyond the contract."""

    name: str
    start: Callable[[Path, int, pytest.FixtureRequest], BlockingEngine]
    """From a model folder and the largest batch (which a server may take as a hint)."""
    seeded: bool
    """Same seed, prefix and weights give the same tokens."""


FLAGS = ("--dtype", "float32", "--max-total-tokens", "40000", "--skip-server-warmup")


def start_server(
    model: Path, folder: Path, flags: Sequence[str] = FLAGS, key_file: Path | None = None
) -> ServerProcess:
    """A real server on this machine, which is not ready yet; its log is in ``folder``."""
    port = free_port()
    command = server_command(sglang_python(), model, "127.0.0.1", port, cuda=False, flags=flags)
    environment = server_environment(cuda=False, key_file=key_file) | {"OMP_NUM_THREADS": "1"}
    return ServerProcess(command, environment, f"http://127.0.0.1:{port}", folder / f"server-{port}.log")


def engine_on(
    url: str,
    model: Path,
    staging: Path,
    on_update: PauseMode = "retract",
    limits: ModelLimits | None = None,
    authorization: Authorization | None = None,
) -> BlockingEngine:
    """An engine on the server at ``url``."""

    async def make() -> Engine:
        server = SglangServer(url, HttpSessions(), authorization or Keyless())
        return SglangEngine(server, limits or limits_of(model), on_update)

    return BlockingEngine(make, model, staging)


class Servers:
    """SGLang servers that tests share, one for each model: a start takes tens of seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[Path, ServerProcess] = {}
        self._started: list[ServerProcess] = []

    def engine(self, model: Path) -> BlockingEngine:
        """An engine on the server of ``model``, which has the weights of that folder, as version 0."""
        engine = engine_on(self.shared(model).url, model, self._folder / f"{model.name}-weights")
        engine.resume()  # an update that a test broke off has left it paused
        if engine.weight_version != 0:
            untrained = read_text_config(model)[0].untrained
            weights = load_file(model / "model.safetensors").items()
            engine.update_weights([one for one in weights if not one[0].startswith(untrained)], 0)
        return engine

    def shared(self, model: Path) -> ServerProcess:
        """The server of ``model``, which may have other weights by now."""
        if model not in self._running:
            self._running[model] = self.start(model)
            self._running[model].wait_ready()
        return self._running[model]

    @contextmanager
    def awake_afterwards(self, model: Path) -> Iterator[BlockingEngine]:
        """``engine``, for a test that has it sleep. If the test fails before the wake, the server is ended:
        whoever asks next gets a new one."""
        engine = self.engine(model)
        try:
            yield engine
        finally:
            if engine.awake:
                engine.close()
            else:  # it is asked nothing: a server that sleeps may never answer
                self._running.pop(model).stop(seconds=1)

    def stop(self) -> None:
        """End them all."""
        for server in self._started:
            server.stop(seconds=1)

    def start(self, model: Path) -> ServerProcess:
        """A server that no other test uses, and that a test may harm. It is not ready yet."""
        has_experts = "num_experts" in (model / "config.json").read_text()
        flags = (*FLAGS, *((flag(ROUTES),) if has_experts else ()))
        self._started.append(start_server(model, self._folder, flags))
        return self._started[-1]


@pytest.fixture(scope="session")
def sglang() -> Path:
    """SGLang's interpreter; tests are skipped where it is not installed."""
    try:
        return sglang_python()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def servers(sglang: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Real SGLang servers, started when a test first asks."""
    started = Servers(tmp_path_factory.mktemp("servers"))
    yield started
    started.stop()


def _local(folder: Path, batch: int, request: pytest.FixtureRequest) -> BlockingEngine:
    async def make() -> Engine:
        return LocalEngine(LocalModel(folder, batch, "float32", "cpu"))

    return BlockingEngine(make, folder, request.getfixturevalue("tmp_path") / "weights")


def _sglang(folder: Path, _batch: int, request: pytest.FixtureRequest) -> BlockingEngine:
    servers: Servers = request.getfixturevalue("servers")
    return servers.engine(folder)


ENGINES = [EngineKind("local", _local, seeded=True), EngineKind("sglang", _sglang, seeded=False)]
"""Every engine of the project; the suite runs on each."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # more gain nothing at this size, and on a busy machine they wait for each other


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_model(family, seed=0, **config)`` is the folder of a random float32 model."""
    made: dict[str, Path] = {}

    def make(family: str, seed: int = 0, **more: Any) -> Path:
        key = f"{family} {seed} {sorted(more.items())}"
        if key not in made:
            torch.manual_seed(seed)
            made[key] = tmp_path_factory.mktemp(family)
            FAMILIES[family](**more).save_pretrained(made[key])
        return made[key]

    return make


def pytest_itemcollected(item: pytest.Item) -> None:
    """In ``make test`` SGLang serves one model; a server of each other one is for ``make test-slow``."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_sglang = getattr(parameters.get("kind"), "name", None) == "sglang"
    if is_sglang and (parameters.get("family", "qwen2") != "qwen2" or item.get_closest_marker("own_model")):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(params=ENGINES, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> EngineKind:
    """The engine under test."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def start(kind: EngineKind, request: pytest.FixtureRequest) -> Iterator[Callable[..., BlockingEngine]]:
    """``start(folder, max_batch=MAX_BATCH)`` is an engine on that model; closed at the end of the test."""
    engines: list[BlockingEngine] = []

    def start_one(folder: Path, max_batch: int = MAX_BATCH) -> BlockingEngine:
        engines.append(kind.start(folder, max_batch, request))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()
