"""GPU check of the policy's offload, reload and turns with a reference: equal bits, the driver's free memory.

It asks the driver, not torch's allocator: engines on the same GPU can use only what the driver calls free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.planning.job import GB
from bapo_megatron.policy.device import free_gpu_bytes, release_cached_memory
from bapo_megatron.policy.megatron import MegatronPolicy
from benchmarks.gpu.rows import Row, Size
from benchmarks.gpu.small_policy import adam_step, build, save

ROUNDS = 2
"""The second round reuses host memory and has the moments of the first step."""
SLACK_GB = 0.3
"""The allocator returns memory in whole segments; cuBLAS and the context grow independently."""


def rows(size: Size, folder: Path) -> Iterator[Row]:
    model = save(size, folder)
    policy = build(model, "bfloat16" if size.cuda else "float32", "model")
    first = policy.state_digest()["weights"]
    adam_step(policy, seed=0)
    for number in range(1, ROUNDS + 1):
        release_cached_memory()
        before, free = policy.state_digest(), free_gpu_bytes()
        kept = policy.offload(keep_weights=True)
        yield freed(f"{number}: masters, moments and gradients leave", kept, free, free_gpu_bytes())
        rest = policy.offload()
        yield freed(f"{number}: the weights leave, too", kept + rest, free, free_gpu_bytes())
        policy.reload()
        equal = policy.state_digest() == before
        said = "digests of weights, masters and moments"
        yield Row(f"{number}: back again", f"{said} {'equal' if equal else 'differ'}", "bit by bit", equal)
        adam_step(policy, seed=number)
    yield reference(policy, model, first)


def reference(policy: MegatronPolicy, model: Path, expected: list[str]) -> Row:
    """Row of the frozen reference: the folder ``model``, with these digests, replaces the policy."""
    before = policy.state_digest()
    policy.load_reference(model)
    assert policy._reference is not None
    digests = []
    for _ in range(ROUNDS):
        with policy._reference.in_place():
            digests.append(policy.state_digest()["weights"])
    there, back = digests == [expected] * ROUNDS, policy.state_digest() == before
    said = f"the reference's digests {'equal' if there else 'differ'}, the policy's are "
    said += "as before" if back else "others"
    return Row("a frozen reference takes turns", said, "bit by bit", there and back)


def freed(name: str, given_up: int, before: int | None, after: int | None) -> Row:
    """Row of an offload: bytes that the policy released, and bytes that the driver gained."""
    if before is None or after is None:
        return Row(name, f"{given_up / GB:.3f} GB given up; no driver to ask")
    gained = after - before
    ok = gained >= given_up - SLACK_GB * GB
    said = f"{given_up / GB:.2f} GB given up, {gained / GB:.2f} more are free"
    return Row(name, said, f"all but {SLACK_GB} GB", ok)
