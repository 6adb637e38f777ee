"""GPU check of weights by IPC handles to a second process, as for colocated engines: equal digests.

Uses CUDA IPC on a GPU, shared memory on a CPU. The reader is a new interpreter, as an engine is, and finds
the GPU by its UUID, as SGLang 0.5.23 does (``srt/utils/patch_torch.py``).
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from bapo_megatron.rollout.weight_sync.buckets import Buckets
from bapo_megatron.rollout.weight_sync.ipc import handles_of, shareable
from bapo_megatron.runtime.processes import die_with_parent
from benchmarks.gpu.rows import Row, Size
from benchmarks.gpu.small_policy import build, save

ANSWER_S = {"cuda": 90.0, "cpu": 600.0}
"""Longest wait for the reader, whose first answer follows all its imports; a CPU may be busy."""


def rows(size: Size, folder: Path) -> Iterator[Row]:
    policy = build(save(size, folder), "bfloat16" if size.cuda else "float32", "model")
    way = "CUDA IPC" if size.cuda else "shared memory"
    try:
        sent, read, buckets, took = handed_over(policy, 2**28 if size.cuda else 2**16)
    except (RuntimeError, OSError, EOFError) as error:
        yield Row(f"weights by {way}", f"{type(error).__name__}: {error}"[:300], "digests equal", False)
        return
    wrong = [name for name, digest in sent.items() if read.get(name) != digest]
    said = f"{len(sent) - len(wrong)} of {len(sent)} tensors in {buckets} buckets, {took:.1f} s with digests"
    ok = not wrong and sent.keys() == read.keys()
    yield Row(f"weights by {way}", said + "".join(f", not {name}" for name in wrong[:3]), "digests equal", ok)


def handed_over(policy: Any, nbytes: int) -> tuple[dict[str, str], dict[str, str], int, float]:
    """Digests by tensor of the trainer and of the reader; number of buckets; seconds for all buckets."""
    ours, theirs = get_context("spawn").Pipe()
    reader = get_context("spawn").Process(target=read_handles, args=(theirs,), daemon=True)
    reader.start()
    theirs.close()
    buckets = Buckets(nbytes, policy.device, partial(shareable, device=policy.device))
    sent: dict[str, str] = {}
    read: dict[str, str] = {}
    count, limit_s = 0, ANSWER_S[policy.device.type]
    try:
        answer(ours, limit_s)  # the reader has imported everything
        start = time.perf_counter()
        for bucket in buckets.cut(policy.hf_weights()):
            named = bucket.tensors()
            ours.send_bytes(handles_of(named))
            sent |= {name: digest(tensor) for name, tensor in named}
            read |= answer(ours, limit_s)  # the bucket stays unchanged until the reader answers
            count += 1
        return sent, read, count, time.perf_counter() - start
    finally:
        ours.close()  # ends the reader, which must close its handles before the buckets are freed
        buckets.release()
        reader.join(10)
        if reader.is_alive():
            reader.kill()


def answer(connection: Connection, limit_s: float) -> dict[str, str]:
    """The reader's next answer. Raises RuntimeError with its exception, or after ``limit_s`` seconds."""
    if not connection.poll(limit_s):
        raise RuntimeError(f"no answer of the second process within {limit_s:g} s")
    digests = connection.recv()
    if isinstance(digests, str):
        raise RuntimeError(digests)
    return dict(digests)


def read_handles(connection: Connection) -> None:
    """Second process: send digests of the tensors in each received pickle, until the pipe closes."""
    die_with_parent()
    plain = reductions.rebuild_cuda_tensor
    reductions.rebuild_cuda_tensor = partial(rebuilt, plain)
    connection.send({})
    while True:
        try:
            handles = connection.recv_bytes()
        except EOFError:
            return
        try:
            connection.send({name: digest(tensor) for name, tensor in pickle.loads(handles)})
        except Exception as error:  # the trainer's side raises it
            connection.send(f"{type(error).__name__}: {error}")


def rebuilt(plain: Any, *arguments: Any) -> Tensor:
    """Tensor from its handle, in which this process's GPU index replaces the UUID."""
    numbers = {
        str(torch.cuda.get_device_properties(number).uuid): number
        for number in range(torch.cuda.device_count())
    }
    tensor: Tensor = plain(*(numbers.get(arg, arg) if isinstance(arg, str) else arg for arg in arguments))
    return tensor


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data.tobytes()).hexdigest()
