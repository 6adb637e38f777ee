"""Checkpoints of a mixture of experts: a layout loads those of any other; bapo-ckpt reads and writes them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.policy.layout import chunk_layers
from checkpoints_tools import inspect_checkpoint, to_hf, to_megatron
from tests.distributed.test_converted_checkpoints import load_converted, log_probs, train_and_save
from tests.support.models import EXPERTS, random_samples, save_tiny_model
from tests.support.policies import small_policy, weights_of
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "one": ParallelConfig(),
    "DP2 EP2": ParallelConfig(data=2, expert=2),
    "TP2 EP2": ParallelConfig(tensor=2, sequence=True, expert=2),
    "TP2 ETP2": ParallelConfig(tensor=2, sequence=True, expert_tensor=2),
    "TP2": ParallelConfig(tensor=2, sequence=True),
    "DP4 EP4": ParallelConfig(data=4, expert=4),
    "DP2 EP2 PP2": ParallelConfig(data=2, expert=2, pipeline=2),
    "DP2 EP2 PP3": ParallelConfig(data=2, expert=2, pipeline=3),
    "DP2 TP2 EP2 ETP2": ParallelConfig(data=2, tensor=2, sequence=True, expert=2, expert_tensor=2),
}
Weights = dict[str, torch.Tensor]


def load_and_look(folder: Path, parallel: ParallelConfig, path: Path) -> tuple[dict, Weights]:
    policy = small_policy(folder, parallel)
    policy.load(path, 1)
    return policy.state_digest(), weights_of(policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(EXPERTS, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("written", slow_but(["DP2 EP2", "TP2 ETP2"], "DP2 EP2"))
def test_every_layout_loads_weights_and_optimizer_bit_for_bit(
    written: str, folder: Path, tmp_path: Path
) -> None:
    path, layout = tmp_path / "policy", LAYOUTS[written]
    [(digest, weights), *others] = run_layout(train_and_save, layout, folder, layout, path, "float32")
    assert all(len(values) == 1 for values in digest.values()), digest
    assert all(other[0] == digest for other in others)
    for name, layout in LAYOUTS.items():
        for found, same in run_layout(load_and_look, layout, folder, layout, path):
            assert found == digest, name
            assert all(torch.equal(same[one], tensor) for one, tensor in weights.items()), name


SOME = ("TP2 ETP2", "DP4 EP4", "DP2 EP2 PP2", "DP2 EP2 PP3", "DP2 TP2 EP2 ETP2")


@pytest.mark.parametrize("written", slow_but(SOME, "DP2 TP2 EP2 ETP2"))
def test_a_checkpoint_of_the_trainer_becomes_a_folder_of_transformers(
    written: str, folder: Path, tmp_path: Path
) -> None:
    path, layout = tmp_path / "policy", LAYOUTS[written]
    [(_, weights), *_] = run_layout(train_and_save, layout, folder, layout, path, "bfloat16")
    to_hf(path, tmp_path / "hf", reference=folder)
    written_at = inspect_checkpoint(path).written_at
    assert (written_at["expert"], written_at["expert_tensor"]) == (layout.expert, layout.expert_tensor)
    assert written_at["pipeline_layers"] == list(chunk_layers(layout, 4))
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def load_both(folder: Path, other: Path, parallel: ParallelConfig, checkpoint: Path) -> tuple[list, list]:
    """Log-probs of a policy made of the folder, and of one of other weights that loaded the checkpoint."""
    samples = random_samples(8, seed=3)
    expected = log_probs(small_policy(folder, parallel), samples)
    policy = small_policy(other, parallel)
    load_converted(policy, checkpoint)
    return expected, log_probs(policy, samples)


@pytest.mark.parametrize("layout", slow_but(SOME, "DP2 EP2 PP2"))
def test_megatron_loads_what_the_converter_writes(layout: str, folder: Path, tmp_path: Path) -> None:
    other = save_tiny_model(EXPERTS, tmp_path / "other", seed=2)
    to_megatron(folder, tmp_path / "megatron", grid=4)
    arguments = (folder, other, LAYOUTS[layout], tmp_path / "megatron/release")
    for expected, found in run_layout(load_both, LAYOUTS[layout], *arguments):
        assert expected
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def digests_of_a_flip(folder: Path, parallel: ParallelConfig) -> tuple[list[str], list[str]]:
    """The digests of the weights, before and after one element of one expert on the last rank is changed."""
    policy = small_policy(folder, parallel)
    before = policy.state_digest()["weights"]
    if dist.get_rank() == dist.get_world_size() - 1:
        key = next(key for key in policy._weights.local if ".experts." in key[0])
        with torch.no_grad():
            policy._weights.local[key][0, 0] += 1e-6
    return before, policy.state_digest()["weights"]


@pytest.mark.parametrize(("layout", "copies"), [("DP2 EP2", 1), ("DP2", 2)])
def test_one_changed_element_of_one_expert_changes_the_digest(layout: str, copies: int, folder: Path) -> None:
    """With a second copy of the expert both digests are told, that of the good one among them."""
    where = {**LAYOUTS, "DP2": ParallelConfig(data=2)}[layout]
    for before, after in run_layout(digests_of_a_flip, where, folder, where):
        assert len(before) == 1
        assert len(after) == copies
        assert (before[0] in after) == (copies == 2)


def gathered_by_one_replica(folder: Path, parallel: ParallelConfig) -> tuple[int, Weights | None]:
    """As in a weight sync: the first replica gathers, the ranks of the others give their experts.

    The calls of collectives of a rank that gives, and the weights of one that gathers.
    """
    policy, calls = small_policy(folder, parallel), Counter[str]()
    if policy.data_rank == 0:
        return 0, weights_of(policy)
    for name in ("broadcast", "all_gather"):
        setattr(dist, name, counted(calls, name))
    policy.give_experts()
    return calls.total(), None


def counted(calls: Counter[str], name: str) -> Callable[..., Any]:
    original = getattr(dist, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return original(*arguments, **named)

    return call


@pytest.mark.parametrize(
    "layout",
    slow_but([*SOME, "DP2 EP2", "DP2 ETP2", "DP2 CP2 EP4", "DP4 EP2", "DP4 EP2 ETP2"], "DP2 ETP2", "DP4 EP2"),
)
def test_one_replica_gathers_the_experts_of_all(layout: str, folder: Path) -> None:
    """With ETP, too, a replica may hold a part of each expert. A rank that does not join ends the wait."""
    more = {
        "DP2 ETP2": ParallelConfig(data=2, expert_tensor=2),
        "DP2 CP2 EP4": ParallelConfig(data=2, context=2, expert=4),
        "DP4 EP2": ParallelConfig(data=4, expert=2),
        "DP4 EP2 ETP2": ParallelConfig(data=4, expert=2, expert_tensor=2),
    }
    where = dataclasses.replace({**LAYOUTS, **more}[layout], timeout_minutes=5)
    wanted = load_file(folder / "model.safetensors")
    ranks = run_layout(gathered_by_one_replica, where, folder, where)
    if layout == "DP4 EP2":  # the second half of the ranks shares its experts with nobody who gathers
        assert [bool(calls) for calls, _ in ranks] == [False, True, False, False]
    found = [one for _, one in ranks if one is not None]
    assert len(found) == where.model_size
    for weights in found:
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
