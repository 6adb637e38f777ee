"""The self-test of Gated DeltaNet's kernels: it passes torch's rule, and notices each planted mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bapo_megatron.commands import verify
from bapo_megatron.config import ModelConfig, ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.layers.delta_net import CHUNK, DeltaNet
from bapo_megatron.policy import delta_net
from bapo_megatron.policy.delta_net import _documents_on, _heads, chunked_rule, gated_delta_rule
from bapo_megatron.trainer import build, kernel_check, sft
from bapo_megatron.trainer.kernel_check import LIMITS, Rule, check_rule, rule_errors
from tests.support.models import HYBRID, save_tiny_model

KIND = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=8, kernel=4)
CPU = torch.device("cpu")


def with_less_gradient(place: int) -> Rule:
    """torch's rule, whose gradient of one argument (decay, beta, weight of the convolution) is half."""

    def rule(*arguments: Any) -> torch.Tensor:
        given = list(arguments)
        given[place] = (given[place] + given[place].detach()) / 2
        return chunked_rule(*given)

    return rule


def keys_of_one_document(x: Any, decay: Any, beta: Any, weight: Any, kind: Any, bounds: Any) -> torch.Tensor:
    """The gradient of the last document's keys is twice as large."""
    part = torch.ones_like(x)
    part[bounds[-2] :, kind.keys : 2 * kind.keys] = 2
    return chunked_rule(x * part + x.detach() * (1 - part), decay, beta, weight, kind, bounds)


def nan_in_a_gradient(x: Any, decay: Any, *others: Any) -> torch.Tensor:
    broken = decay * 1
    broken.register_hook(lambda grad: torch.cat([grad[:-1], grad[-1:] * torch.nan]))
    return chunked_rule(x, broken, *others)


def one_document(x: Any, decay: Any, beta: Any, weight: Any, kind: Any, bounds: Any) -> torch.Tensor:
    return chunked_rule(x, decay, beta, weight, kind, (0, bounds[-1]))


def convolution_over_bounds(
    x: Any, decay: Any, beta: Any, weight: Any, kind: Any, bounds: Any
) -> torch.Tensor:
    """The state begins anew, the convolution does not."""
    mixed = F.silu(F.conv1d(F.pad(x.T[None], (kind.kernel - 1, 0)), weight, groups=len(weight)))[0].T
    parts = [
        gated_delta_rule(*_heads(mixed[None, a:b], kind), decay[None, a:b], beta[None, a:b])[0].flatten(1)
        for a, b in pairwise(bounds)
    ]
    return torch.cat(parts)


def raising(*_: Any) -> torch.Tensor:
    raise RuntimeError("Triton Error [CUDA]: no kernel image\nand a page of advice")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_rule_passes_with_a_wide_margin(dtype: torch.dtype) -> None:
    found = rule_errors(chunked_rule, KIND, dtype, CPU)
    assert found.keys() == LIMITS.keys()
    assert all(error < LIMITS[name] / 3 for name, error in found.items()), found
    check_rule(chunked_rule, KIND, dtype, CPU)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (with_less_gradient(1), r"rule: gradient of the decay by 0\.\d+ of the root mean square \("),
        (with_less_gradient(2), r"rule: gradient of beta by 0\.\d+ of the root"),
        (with_less_gradient(3), r"rule: gradient of the convolution by 0\.5 of"),
        (keys_of_one_document, r"rule: gradient of keys by [\d.]+ of"),
        (nan_in_a_gradient, "rule: gradient of the decay by nan "),
        (one_document, r"rule: output by [\d.]+, gradient of queries by"),
        (convolution_over_bounds, r"rule: output by [\d.]+, gradient of queries by"),
        (raising, r"raises RuntimeError: Triton Error \[CUDA\]: no kernel image \(.*, torch \d"),
    ],
)
def test_a_wrong_kernel_is_named(rule: Rule, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check_rule(rule, KIND, torch.bfloat16, CPU)
    assert f"torch {torch.__version__}, CPU" in str(refused.value)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU that is made up, for the choice of the kernels alone."""
    monkeypatch.setattr(kernel_check, "has_cuda", lambda: True)
    return monkeypatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(HYBRID, tmp_path_factory.mktemp("model"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", None)
    monkeypatch.setattr(kernel_check, "_version", lambda _name: None)
    said = "raises ModuleNotFoundError: .*fla.*fla-core not installed.* Install fla-core==0.6.0"
    with pytest.raises(ConfigError, match=said):
        check_rule(delta_net.kernel_rule, KIND, torch.bfloat16, CPU)


def test_a_run_tests_the_kernel_with_its_own_sizes(on_gpu: pytest.MonkeyPatch, folder: Path) -> None:
    sizes = json.loads((folder / "config.json").read_text())
    seen: list[Any] = []
    on_gpu.setattr(kernel_check, "select_device", lambda: CPU)
    on_gpu.setattr(kernel_check, "release_cached_memory", lambda: None)
    on_gpu.setattr(kernel_check, "check_rule", lambda *arguments: seen.append(arguments))
    told: list[Any] = []  # a rank whose kernel is wrong ends the others
    on_gpu.setattr(kernel_check, "on_all_ranks", lambda call: told.append(call()))
    kernel_check.check_kernels(ModelConfig(folder, "bfloat16"), ParallelConfig(tensor=2))
    [(rule, kind, dtype, place)] = seen
    assert (rule, dtype, place) == (delta_net.kernel_rule, torch.bfloat16, CPU)
    assert kind.key_heads == sizes["linear_num_key_heads"] // 2
    assert kind.value_heads == sizes["linear_num_value_heads"] // 2
    assert kind.value_dim == sizes["linear_value_head_dim"]
    kernel_check.check_kernels(ModelConfig(folder, "float32"), ParallelConfig())
    assert (len(seen), len(told)) == (1, 1)


@pytest.mark.parametrize(
    ("module", "start"),
    [
        (build, lambda config: build.open_run(config, None, None).__enter__()),
        (sft, sft.run_sft),
        (verify, verify.verify_layout),
    ],
    ids=["train", "sft", "verify-parallel"],
)
def test_commands_that_build_a_policy_test_the_kernels_first(
    module: ModuleType, start: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*asked: str) -> None:
        raise ConfigError(f"tested: {asked}")

    monkeypatch.setattr(module, "check_kernels", refused)
    config = SimpleNamespace(paths=None, certificate=None, model="model", parallel="layout")
    with pytest.raises(ConfigError, match=r"^tested: \('model', 'layout'\)$"):
        start(config)


def test_chunks_of_a_pack_for_the_kernels() -> None:
    """As the package's ``prepare_chunk_indices`` makes them, which would wait for the GPU."""
    found = _documents_on((0, 1, 65, 130), CPU)
    assert found["cu_seqlens"].tolist() == [0, 1, 65, 130]
    assert found["chunk_indices"].tolist() == [[0, 0], [1, 0], [2, 0], [2, 1]]
    assert {tensor.dtype for tensor in found.values()} == {torch.int64}
    assert CHUNK == 64
