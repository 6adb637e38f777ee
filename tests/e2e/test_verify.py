"""`bapo verify-parallel` as a user runs it, on sound layouts and on layouts that were broken on purpose.

The processes are forked from the test, so what it breaks is broken in them; each break applies to the
checked layout only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from bapo_megatron import cli
from bapo_megatron.commands import verify as check
from bapo_megatron.commands.layout_reference import read_layout_reference, write_layout_reference
from bapo_megatron.policy import megatron
from bapo_megatron.policy.experts import RouterCounters
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.passes import Passes
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.tensor_types import TokenStats
from tests.support.forked_commands import start_bapo
from tests.support.models import save_nearly_tied_experts, save_tiny_model
from tests.support.tiers import slow_but

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

ROOT = Path(__file__).parents[2]
TP2_PP2 = ["--parallel.tensor=2", "--parallel.pipeline=2"]
COMMAND = ["verify-parallel", "recipes/demo_cpu.py"]
LAUNCHED = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
SMALL = ["--tokens=600", "--longest=64", "--rollout.max-response-tokens=64", "--batch.pack-tokens=112"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process forked from one that has computed with several threads may use no more than one."""
    monkeypatch.setattr("bapo_megatron.runtime.distributed.os.cpu_count", lambda: 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, and no tokenizer: the check needs none."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


def verify(model: Path, *flags: str) -> int:
    arguments = ["verify-parallel", str(ROOT / "recipes/demo_cpu.py"), f"--model.hf-path={model}"]
    try:
        return cli.run([*arguments, "--data.path=absent.jsonl", *SMALL, *flags])
    except SystemExit as exit:
        return int(exit.code)


def output(capfd: pytest.CaptureFixture[str]) -> str:
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err, printed.err[-3000:]
    return printed.out


@pytest.mark.parametrize(
    "flags",
    slow_but([TP2_PP2, ["--parallel.data=2", "--reference.tensor=2", "--reference.sequence"]], TP2_PP2),
    ids=["tp2-pp2", "dp2-against-tp2-sp"],
)
def test_a_sound_layout(
    flags: list[str],
    model: Path,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = verify(model, *flags, "--tolerance.token-absolute=2e-6"), output(capfd)
    assert code == 0, printed
    for quantity in ("log-probs", "entropies", "contribution sums", "bounds", "loss", "gradient norm"):
        [line] = [line for line in printed.splitlines() if line.startswith(quantity)]
        assert line.endswith("ok")
    assert re.search(r"all 6 quantities agree over \d{3} tokens of \d+ samples", printed)
    assert list(tmp_path.iterdir()) == []  # no run directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_nearly_tied_experts(tmp_path_factory.mktemp("experts"))


def test_rounding_decides_no_route_of_a_mixture_of_experts(
    experts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sound layout of a model whose routers' choices differ at every layout, and a wrong expert."""
    path, flags = tmp_path / "reference.npz", ["--parallel.tensor=2", "--parallel.sequence"]
    flags.append("--parallel.expert=2")
    assert verify(experts, f"--save={path}") == 0
    assert verify(experts, *flags, f"--certificate={path}") == 0, output(capfd)
    assert "all 6 quantities agree" in output(capfd)
    with monkeypatch.context() as patch:
        break_expert(patch)
        assert verify(experts, *flags, f"--certificate={path}") == 1
        assert "the layouts differ, first in the log-probs" in output(capfd)
    # By the routers' own choices the same layout differs.
    monkeypatch.setattr(check, "with_random_routes", lambda samples, *_: list(samples))
    own = tmp_path / "own.npz"
    assert verify(experts, f"--save={own}") == 0
    assert verify(experts, *flags, f"--certificate={own}") == 1
    assert "the layouts differ, first in the log-probs" in output(capfd)


def break_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank holds a wrong row of one matrix of its last expert."""
    sound = megatron.build_optimizer

    def build_optimizer(settings: object, model: list, dtype: torch.dtype) -> object:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            matrices = [weight for name, weight in model[0].named_parameters() if ".experts." in name]
            with torch.no_grad():
                matrices[-1][0] *= 1.5
        return sound(settings, model, dtype)

    monkeypatch.setattr(megatron, "build_optimizer", build_optimizer)


def break_log_prob(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the first pack is off by 0.01 at the checked layout."""
    sound = MegatronPolicy.log_probs

    def log_probs(self: MegatronPolicy, batches: list) -> list[TokenStats]:
        stats = sound(self, batches)
        if torch.distributed.get_world_size() > 1:
            stats[0].log_prob_T[5] += 0.01
        return stats

    monkeypatch.setattr(MegatronPolicy, "log_probs", log_probs)


def break_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP rank 1 holds a wrong row of its last weight matrix."""
    sound = megatron.build_optimizer

    def build_optimizer(settings: object, model: list, dtype: torch.dtype) -> object:
        if parallel_state.get_tensor_model_parallel_rank() == 1:
            matrices = [weight for weight in model[0].parameters() if weight.dim() == 2]
            with torch.no_grad():
                matrices[-1][0] *= 1.1
        return sound(settings, model, dtype)

    monkeypatch.setattr(megatron, "build_optimizer", build_optimizer)


def break_loss_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last data-parallel rank is left out of every reduced sum."""
    sound = Passes._sum_over_ranks

    def sum_over_ranks(
        self: Passes, outputs: list, width: int, counters: RouterCounters | None = None
    ) -> torch.Tensor:
        if parallel_state.get_data_parallel_rank() > 0:
            outputs = [torch.zeros_like(values) for values in outputs]
        return sound(self, outputs, width, counters)

    monkeypatch.setattr(Passes, "_sum_over_ranks", sum_over_ranks)


def break_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two copies of the tied embedding, on first and last stage, do not exchange their gradients."""
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]  # a function hides its name
    monkeypatch.setattr(module, "_allreduce_word_embedding_grads", lambda *_args, **_kwargs: None)


BREAKS = {
    "one log-prob": (break_log_prob, ["--parallel.tensor=2"], "log-probs"),
    "a shard": (break_shard, TP2_PP2, "log-probs"),
    "a reduction": (break_loss_sums, ["--parallel.data=2"], "contribution sums"),
    "a gradient": (break_gradient, ["--parallel.pipeline=2"], "gradient norm"),
}


@pytest.mark.parametrize("name", slow_but(BREAKS, "a shard", "a gradient"))
def test_a_broken_layout_is_named(
    name: str, model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, flags, quantity = BREAKS[name]
    break_it(monkeypatch)
    code, printed = verify(model, *flags), output(capfd)
    assert code == 1, printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith(f"the layouts differ, first in the {quantity}: ")
    if quantity == "log-probs":
        where = r"sample \d+, token \d+ of \d+ \(.*, id \d+\): -\d+\.\d+ in the reference, -\d+\.\d+ here"
        assert re.search(where, last), last
    if name == "one log-prob":
        assert "1 of " in last


def test_a_layout_reference_is_checked_at_another_layout(
    model: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "reference.npz"
    assert verify(model, "--parallel.tensor=2", f"--save={path}") == 0
    assert read_layout_reference(path).made["parallel.tensor"] == 2
    assert verify(model, "--parallel.pipeline=2", f"--certificate={path}") == 0
    printed = output(capfd)
    assert "reference:    TP 2, PP 1" in printed
    assert "this layout:  TP 1, PP 2" in printed
    stored = read_layout_reference(path)
    stored.tokens.entropies[1][3] += 0.5
    write_layout_reference(path, stored)
    assert verify(model, "--parallel.pipeline=2", f"--certificate={path}") == 1
    assert "first in the entropies: at sample 1, token 4 of 64" in output(capfd)


@pytest.mark.slow
def test_bfloat16_layouts_are_within_their_tolerance(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, printed = verify(model, *TP2_PP2, "--model.dtype=bfloat16"), output(capfd)
    assert code == 0, printed
    assert "0.5 + 0.05 rel, mean 0.1" in printed
    assert verify(model, *TP2_PP2, "--model.dtype=bfloat16", "--tolerance.token-mean=1e-6") == 1


@pytest.mark.slow
def test_every_rank_of_a_launcher_ends_with_the_same_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with the variables of torchrun, which test_runs.py starts; rank 0 alone talks."""
    path = tmp_path / "reference.npz"
    assert verify(model, f"--save={path}") == 0
    flags = [f"--model.hf-path={model}", *SMALL, "--parallel.tensor=2", f"--certificate={path}"]
    for tolerance, code, says in (
        ("5e-4", 0, "all 6 quantities agree"),
        ("-1", 1, "first in the log-probs: at sample 0, token 1 of 2"),
    ):
        for name, value in {**LAUNCHED, "MASTER_PORT": str(free_port())}.items():
            monkeypatch.setenv(name, value)
        ranks = []
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            ranks.append(start_bapo(*COMMAND, *flags, f"--tolerance.token-absolute={tolerance}"))
        first, second = (process.communicate(timeout=900)[0].decode() for process in ranks)
        assert [process.returncode for process in ranks] == [code, code], first
        assert says in first
        assert second == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--longest=1"], "longest=1 must be from 2 to 112"),
        (["--longest=113"], "longest=113 must be from 2 to 112"),
        (["--tokens=65"], "tokens=65 must be at least 66"),
        (["--parallel.tensor=3"], "parallel.tensor=3 does not divide"),
        (["--reference.pipeline=9"], "the reference's layout (--reference.*): parallel.pipeline"),
        (["--reference.sequence"], "the reference's layout (--reference.*): parallel.sequence needs"),
        (["--certificate=absent.npz"], "absent.npz does not exist"),
        (["--save=absent/c.npz"], "absent does not exist; make it"),
    ],
)
def test_bad_input(flags: list[str], message: str, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify(model, *flags) == 2
    assert message in capfd.readouterr().err


def test_a_layout_reference_of_something_else(
    model: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "reference.npz"
    assert verify(model, f"--save={path}") == 0
    other = save_tiny_model("llama", tmp_path / "other", seed=1)
    capfd.readouterr()
    assert verify(other, f"--certificate={path}", "--seed=5", "--rollout.temperature=0.5") == 2
    message = capfd.readouterr().err
    assert "canary.seed: 0 in the certificate, 5 here" in message
    assert "rollout.temperature: 1.0 in the certificate, 0.5 here" in message
    assert "model.weights_sha256: " in message
    assert "config_sha256" not in message


def test_a_launcher_without_a_layout_reference(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert verify(model, "--parallel.tensor=2") == 2
    assert "--certificate FILE" in capfd.readouterr().err
