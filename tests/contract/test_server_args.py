"""The flags of servers on GPUs, read by SGLang's own ``ServerArgs`` as if this machine had an H100."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.planning.engine_states import state_cache
from bapo_megatron.planning.job import Job, PlanOptions, find_shape, shape_folder
from bapo_megatron.rollout.engines.sglang.requirements import (
    IN_PLACE,
    NO_PREFILL_GRAPH,
    ROUTED_KERNEL,
)
from bapo_megatron.rollout.engines.sglang.server_process import (
    server_command,
    server_environment,
    server_flags,
)
from bapo_megatron.runtime.child_process import AnsweringChild
from tests.support.cluster_recipes import CLUSTER_RECIPES, cluster_recipe

ROOT = Path(__file__).parents[2]
HYBRID = re.compile(r"qwen3_[568]_\d")
READER = ROOT / "tests/support/sglang_server_args.py"
FIELDS = (
    *("error", "model_path", "tp_size", "base_gpu_id", "context_length", "dtype", "mem_fraction_static"),
    *("weight_version", "skip_tokenizer_init", "device", *IN_PLACE),
    *("cuda_graph_config", "enable_memory_saver", "graphs"),
    *("enable_return_routed_experts", "moe_runner_backend"),
    *("uses_mamba_radix_cache", "mamba_radix_cache_strategy", "max_mamba_cache_size", "mamba_ssm_dtype"),
)


def model_of(recipe: Path, config: RunConfig, folder: Path) -> Path:
    """A folder with the recipe's config.json, completed by the name of the model's class."""
    about = json.loads((shape_folder(recipe, config.model.hf_path) / "config.json").read_text())
    model = folder / config.model.hf_path.name
    model.mkdir(exist_ok=True)
    words = about["model_type"].split("_")
    about.setdefault("architectures", ["".join(map(str.capitalize, words)) + "ForCausalLM"])
    (model / "config.json").write_text(json.dumps(about))
    return model


def flags_of(config: RunConfig, model: Path, number: int = 0) -> list[str]:
    """What our launcher of ``sglang.launch_server`` gets on a GPU."""
    command = server_command(Path("python"), model, "127.0.0.1", 30000, True, server_flags(config, number))
    assert (command[0], Path(command[1]).parts[-2:]) == ("python", ("sglang_launch", "launch.py"))
    return command[2:]


Reader = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def resolved(sglang: Path) -> Iterator[Reader]:
    """SGLang's settings for each command line, by one process that has imported it."""
    environment = server_environment(cuda=True, python=sglang) | {"CUDA_VISIBLE_DEVICES": ""}
    with closing(AnsweringChild([str(sglang), str(READER)], environment)) as child:

        def read(lines: list[list[str]], colocated: bool = False, **platform: bool) -> list[dict[str, Any]]:
            """In the environment of such servers. ``platform``: what differs from an H100."""
            own = server_environment(cuda=True, colocated=colocated, python=sglang)
            own |= {"CUDA_VISIBLE_DEVICES": ""}
            asked = {"lines": lines, "fields": FIELDS, "platform": platform, "environment": own}
            return child.ask(asked, 900)  # type: ignore[no-any-return]

        yield read


def variants(folder: Path) -> list[tuple[str, RunConfig, list[str]]]:
    """Every recipe as it stands, and with servers that keep requests in place: name, settings, flags."""
    found = []
    for recipe in CLUSTER_RECIPES:
        config = load_recipe(recipe, RunConfig)
        ways = [config]
        if not config.rollout.sglang.colocated:
            in_place = replace(config.rollout.sglang, on_update="in_place", servers=2)
            ways.append(replace(config, rollout=replace(config.rollout, sglang=in_place)))
        for one in ways:
            number = one.rollout.sglang.servers - 1
            found.append((recipe.stem, one, flags_of(one, model_of(recipe, config, folder), number)))
    return found


def test_servers_of_hybrids_have_the_states_that_the_plan_says(resolved: Reader, tmp_path: Path) -> None:
    """Slots for all requests of a step, by the strategy that SGLang takes on a GPU; states in float32."""
    found = [one for one in variants(tmp_path) if HYBRID.match(one[0])]
    assert len(found) >= 3
    for (name, config, _), settings in zip(found, resolved([flags for *_, flags in found]), strict=True):
        assert "error" not in settings, f"{name}: {settings}"
        job = Job(config, find_shape(cluster_recipe(name), config.model.hf_path), PlanOptions())
        states = state_cache(job, job.gpu.memory)
        assert states is not None
        kept = config.rollout.sglang.on_update != "in_place"
        assert settings["uses_mamba_radix_cache"] is kept, name
        assert states.per_request == (5 if kept else 1)
        if kept:
            assert settings["mamba_radix_cache_strategy"] == "extra_buffer", name
        assert settings["max_mamba_cache_size"] == states.slots >= states.per_request * 128, name
        assert settings["mamba_ssm_dtype"] is None, name  # that of config.json, as in the recipes' shapes


def without(flags: list[str], name: str) -> list[str]:
    """The flags without one, and its value."""
    place = flags.index(name)
    return flags[:place] + flags[place + 2 :]


@pytest.mark.parametrize("colocated", [True, False])
def test_sglang_accepts_the_server_flags_of_every_recipe(
    resolved: Reader, colocated: bool, tmp_path: Path
) -> None:
    wanted = [one for one in variants(tmp_path) if one[1].rollout.sglang.colocated is colocated]
    assert wanted
    flags = wanted[0][2]
    by_hand = [*without(flags, NO_PREFILL_GRAPH[0]), "--cuda-graph-backend-prefill=full"]
    # What the test itself would notice: a flag that SGLang lacks, and one that a check refuses.
    mistakes = [[*flags, "--no-such-flag"], [*flags, "--attention-backend", "none-such"]]
    default = without(flags, NO_PREFILL_GRAPH[0])
    lines = [*(line for _, _, line in wanted), default, by_hand, *mistakes]
    found = resolved(lines, colocated)
    for (name, config, _), settings in zip(wanted, found, strict=False):
        sglang = config.rollout.sglang
        in_place = sglang.on_update == "in_place"
        assert "error" not in settings, f"{name}: {settings}"
        assert settings["tp_size"] == sglang.tensor, name
        assert settings["base_gpu_id"] == sglang.first_gpu + (sglang.servers - 1) * sglang.tensor, name
        assert settings["context_length"] == config.longest_request + 8, name
        assert settings["mem_fraction_static"] == sglang.memory_fraction, name
        assert (settings["dtype"], settings["device"]) == (config.model.dtype, "cuda"), name
        assert (settings["weight_version"], settings["skip_tokenizer_init"]) == ("0", True), name
        assert [settings[field] for field in IN_PLACE] == [in_place] * len(IN_PLACE), name
        assert settings["enable_memory_saver"] is colocated, name
        assert settings["cuda_graph_config"]["prefill"]["backend"] == "disabled", name
        assert settings["graphs"] == {"decode": "FullCudaGraphBackend"}, name
    without_flag, with_own = found[len(wanted) : len(wanted) + 2]
    if colocated:  # the memory saver is the real one: SGLang's default ends such a server at its start
        refusal = "Breakable CUDA graph is not compatible with memory saver mode"
        assert without_flag == {"error": f"NotImplementedError: {refusal}"}
    else:
        assert without_flag["graphs"]["prefill"] == "BreakableCudaGraphBackend"
    assert with_own["graphs"]["prefill"] == "FullCudaGraphBackend"
    assert all("error" in settings for settings in found[len(wanted) + 2 :])


@pytest.mark.parametrize(("blackwell", "default"), [(True, "flashinfer_trtllm"), (False, "auto")])
def test_servers_that_return_routes_are_told_the_experts_on_every_gpu(
    resolved: Reader, blackwell: bool, default: str, tmp_path: Path
) -> None:
    """Where SGLang would take a kernel that chooses experts itself, whose routes are zeros."""
    recipe = ROOT / "recipes/qwen3_30b_a3b.py"
    config = load_recipe(recipe, RunConfig)
    flags = flags_of(config, model_of(recipe, config, tmp_path))
    lines = [flags, without(flags, ROUTED_KERNEL[0])]
    ours, theirs = resolved(lines, is_sm100=blackwell)
    assert (ours["enable_return_routed_experts"], ours["moe_runner_backend"]) == (True, "triton")
    assert theirs["moe_runner_backend"] == default
