"""Servers that a run starts beside itself: on which GPUs. The number of GPUs is made up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from bapo_megatron.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.server_process import server_flags
from bapo_megatron.trainer import preflight

CheckGpus = Callable[[RunConfig, int], None]


@pytest.fixture
def check_gpus(monkeypatch: pytest.MonkeyPatch) -> CheckGpus:
    """The check of a run's engine on a machine with so many GPUs."""

    def check(config: RunConfig, gpus: int) -> None:
        monkeypatch.setattr(preflight, "has_cuda", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        preflight._check_engine(config)

    return check


def run(
    parallel: ParallelConfig | None = None, evaluation: EvaluationConfig | None = None, **fields: object
) -> RunConfig:
    sglang = SglangConfig(python=Path(sys.executable), **fields)  # type: ignore[arg-type]
    return RunConfig(
        name="gpus",
        model=ModelConfig(Path("model")),
        data=DataConfig(Path("data"), max_prompt_tokens=100),
        parallel=parallel or ParallelConfig(tensor=4, sequence=True),
        rollout=RolloutConfig(engine="sglang", max_response_tokens=1000, sglang=sglang),
        evaluation=evaluation or EvaluationConfig(),
    )


FOUR = ParallelConfig(tensor=4, sequence=True)
EIGHT = ParallelConfig(tensor=4, data=2, sequence=True)
OFFLOADED = replace(EIGHT, offload=True)


@pytest.mark.parametrize(
    ("parallel", "fields", "says"),
    [
        (FOUR, {"first_gpu": 4, "servers": 4}, ""),
        (FOUR, {"first_gpu": 7, "servers": 5, "urls": ("http://elsewhere:1",)}, ""),
        (FOUR, {"first_gpu": 4, "servers": 5}, "take GPUs 4 to 8, but this machine has 8"),
        (FOUR, {"memory_fraction": 0.5}, ""),  # shared, and there is memory left
        (FOUR, {}, "trains on GPUs 0 to 3: set rollout.sglang.first_gpu to 4"),
        (EIGHT, {"first_gpu": 7}, "take GPUs 7 to 7, and this run trains on GPUs 0 to 7"),
        # In turns, the share of the memory is not a matter, the number of GPUs is.
        (OFFLOADED, {"servers": 8, "colocated": True, "memory_fraction": 0.9}, ""),
        (OFFLOADED, {"servers": 2, "first_gpu": 6, "colocated": True}, ""),
        (OFFLOADED, {"servers": 8, "first_gpu": 1, "colocated": True}, "this machine has 8"),
        (OFFLOADED, {"servers": 8}, "rollout.sglang.colocated and parallel.offload"),
    ],
)
def test_servers_need_gpus_of_their_own_or_turns(
    parallel: ParallelConfig, fields: dict[str, Any], says: str, check_gpus: CheckGpus
) -> None:
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_gpus(run(parallel, **fields), 8)


def test_a_server_has_room_for_the_longest_response_of_an_evaluation() -> None:
    def context(**evaluation: Any) -> str:
        flags = server_flags(run(evaluation=EvaluationConfig(**evaluation)))
        return flags[flags.index("--context-length") + 1]

    longer: dict[str, Any] = {"suites": ("a",), "max_response_tokens": 3000}
    assert context() == context(every=0, **longer) == "1108"  # 8 more than both, which SGLang reserves
    assert context(every=2, **longer) == "3108"
    with pytest.raises(ConfigError, match="rollout.sglang.context=2000 is less than .*3100"):
        run(evaluation=EvaluationConfig(every=2, **longer), context=2000).check()


def test_servers_of_a_bfloat16_model_keep_their_logits_in_float32() -> None:
    """As the trainer does; a float32 model's are so anyway."""
    for dtype, given in (("bfloat16", True), ("float32", False)):
        config = replace(run(), model=ModelConfig(Path("model"), dtype))  # type: ignore[arg-type]
        assert ("--enable-fp32-lm-head" in server_flags(config)) is given


ROUTED = ["--enable-return-routed-experts", "--moe-runner-backend", "triton"]


@pytest.mark.parametrize(
    ("replay", "cuda", "own", "given"),
    [
        ("off", True, (), []),
        ("replay", True, (), ROUTED),
        ("measure", True, ("--log-level", "info"), ROUTED),
        ("replay", False, (), ROUTED[:1]),
        ("replay", True, ("--moe-runner-backend", "flashinfer_trtllm_routed"), ROUTED[:1]),
        ("replay", True, ("--moe-a2a-backend", "deepep"), ROUTED[:1]),
    ],
)
def test_servers_that_return_routes_have_a_kernel_that_is_told_its_experts(
    replay: Literal["off", "measure", "replay"], cuda: bool, own: tuple[str, ...], given: list[str]
) -> None:
    """On Blackwell SGLang's default chooses experts within, and the routes would be zeros."""
    config = run(flags=own)
    config = replace(config, rollout=replace(config.rollout, route_replay=replay))
    found = server_flags(config, cuda=cuda)
    assert tuple(found[len(found) - len(own) :]) == own
    assert [one for one in found[: len(found) - len(own)] if one in ROUTED] == given


def test_servers_elsewhere_need_no_interpreter_here(tmp_path: Path, check_gpus: CheckGpus) -> None:
    def asked(urls: tuple[str, ...]) -> RunConfig:
        config = run(first_gpu=4, urls=urls)
        sglang = replace(config.rollout.sglang, python=tmp_path / "none")
        return replace(config, rollout=replace(config.rollout, sglang=sglang))

    check_gpus(asked(("http://node9:1",)), 8)
    with pytest.raises(ConfigError, match="no interpreter at .*none"):
        check_gpus(asked(()), 8)
