"""Places where the host would wait for a GPU in an update, and the output layer's step, before and after.

    python -m benchmarks.host_waits             # a few minutes on one core; needs the repository's history
    python -m benchmarks.host_waits --quick     # the present code alone, only printed

The same program runs on the package of commit 1d1f58e and on the present one. Waits are counted on a CPU, by
operators and calls that read a device or copy numbers to one (``tests/support/host_waits.py``); reads of
tensors that never leave the host are left out. The steps of both take turns, each in a process of its own.
Writes benchmarks/results/host_waits.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.algo.bapo import eq8_literal
from bapo_megatron.algo.losses import build_loss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.config import AlgorithmConfig, BatchConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.policy.output_head import OutputHead
from benchmarks.common import is_quick, machine, one_process, random_samples, save_model, torch_policy, write
from tests.support.host_waits import HostWaits

ROOT = Path(__file__).parents[1]
BEFORE = "1d1f58e"
CHUNKS = {"before": 1024, "now": 4096}
"""The defaults on a GPU."""
LAYERS, VOCAB, PACK, PACKS = 8, 512, 8192, 2
HOST_ONLY = ("attention/padded.py", "policy/megatron.py update", "optimizer/optimizer.py", "algo/bounds.py")
TOKENS, WIDTH, ENTRIES, ROUNDS = 2048, 256, 8192, 3


def mask_tokens() -> None:
    """Let the present code treat tokens as on a GPU; the earlier code knew one way only."""
    from bapo_megatron.algo import sums, tokens

    for module in (tokens, sums):
        if hasattr(module, "selects"):
            module.selects = lambda _device: False  # type: ignore[attr-defined]


def count(chunk_tokens: int) -> dict[str, int]:
    """Waits of a forward pass for the bounds and of the update, by file and function."""
    mask_tokens()
    with tempfile.TemporaryDirectory() as folder, one_process(1):
        model = save_model(Path(folder), 64, LAYERS, VOCAB, PACK)
        policy = torch_policy(model, BatchConfig(pack_tokens=PACK, logprob_chunk_tokens=chunk_tokens))
        packs = pack_samples(random_samples(11, PACK // 2, VOCAB), PACK, "token", policy.pack_layout)
        loss = build_loss(AlgorithmConfig(bounds=eq8_literal()))
        search = loss.search
        assert search is not None
        assert len(packs) == PACKS
        places: Counter[str] = Counter()
        for _ in range(2):  # the second time, what is made once is there
            with HostWaits() as forward:
                measured = policy.token_sums(packs, search.measure)
            found = search.find(measured)
            with HostWaits() as update:
                policy.update(packs, Objective(loss).token_fn(found, policy.version))
            places = forward.places + update.places
    return {place: number for place, number in places.items() if not place.startswith(HOST_ONLY)}


def step_seconds(dtype: str) -> float:
    """Best of three processor times of the output layer: log-probs, an update's vector, gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_TH = torch.randn(TOKENS, WIDTH).to(getattr(torch, dtype)).requires_grad_()
    weight_VH = (torch.randn(ENTRIES, WIDTH) / WIDTH**0.5).to(getattr(torch, dtype)).requires_grad_()
    [pack] = pack_samples(random_samples(8, TOKENS // 4, ENTRIES), TOKENS)
    pack = pack.take(torch.arange(TOKENS) % pack.token_T.numel())
    loss = build_loss(AlgorithmConfig(bounds=eq8_literal()))
    assert loss.search is not None
    found = loss.search.find(torch.zeros(loss.search.size, dtype=torch.float64))
    fn, seconds = Objective(loss).token_fn(found, 0), []
    for _ in range(3):
        start = time.process_time()
        OutputHead(0.6, 1024).sums(hidden_TH, weight_VH, pack, fn)[0].backward()
        seconds.append(time.process_time() - start)
    return min(seconds)


def on(package: Path, *arguments: object) -> Any:
    """What this program finds with the package in a folder."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.host_waits", "--one", *map(str, arguments)]
    found = subprocess.run(
        command,
        cwd=package,
        env={**os.environ, "PYTHONPATH": f"{package}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])


def report() -> str:
    with tempfile.TemporaryDirectory() as folder:
        packages = {"before": Path(folder), "now": ROOT}
        archive = subprocess.run(["git", "archive", BEFORE, "bapo_megatron"], cwd=ROOT, stdout=-1, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        waits = {name: on(package, "count", CHUNKS[name]) for name, package in packages.items()}
        rounds = [
            {(name, dtype): on(packages[name], "step", dtype) for dtype in DTYPES for name in packages}
            for _ in range(ROUNDS)
        ]
    return _text(waits, {key: statistics.median(found[key] for found in rounds) for key in rounds[0]})


DTYPES = ("float32", "bfloat16")


def _text(waits: dict[str, dict[str, int]], seconds: dict[tuple[str, str], float]) -> str:
    places = sorted(waits["before"] | waits["now"], key=lambda place: -waits["before"].get(place, 0))
    table = "\n".join(
        f"| `{place}` | {waits['before'].get(place, 0)} | {waits['now'].get(place, 0)} |" for place in places
    )
    steps = "\n".join(
        f"| {dtype} | {1000 * seconds['before', dtype]:.0f} ms | {1000 * seconds['now', dtype]:.0f} ms "
        f"| {seconds['now', dtype] / seconds['before', dtype]:.2f} |"
        for dtype in DTYPES
    )
    return f"""# Waits of the host in an update

Command: `python -m benchmarks.host_waits`

One forward pass for the bounds and one update, {PACKS} packs of {PACK:,} tokens, {LAYERS} layers without
Transformer Engine, TP 1; "before" is commit {BEFORE} with chunks of {CHUNKS["before"]:,} tokens, "now" has
{CHUNKS["now"]:,}, the defaults on a GPU. Counted on a CPU; copies of numbers to the device are counted too.

| where | before | now |
|---|---:|---:|
| **all** | **{sum(waits["before"].values())}** | **{sum(waits["now"].values())}** |
{table}

`local_multi_tensor_l2_norm` is megatron-core's norm of the gradient without Transformer Engine; with it there
is one read. What is left besides does not grow with chunks, layers or packs.

## The output layer's step

{machine()}, one thread; processor time, on a machine with other work: only the ratio counts.
{TOKENS:,} tokens, vocabulary {ENTRIES:,}, hidden size {WIDTH}, chunks of 1,024: log-probs, loss, all
measurements, gradients. Medians of {ROUNDS} processes that took turns. A CPU has no matmul from bfloat16 to
float32 and widens both sides; a GPU has one.

| type | before | now | now / before |
|---|---:|---:|---:|
{steps}
"""


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--one"]:
        what, value = arguments[1:]
        print(json.dumps(count(int(value)) if what == "count" else step_seconds(value)))
    elif is_quick(__doc__):
        print(json.dumps(count(CHUNKS["now"]), indent=2))
    else:
        write("host_waits", report())


if __name__ == "__main__":
    main(sys.argv[1:])
