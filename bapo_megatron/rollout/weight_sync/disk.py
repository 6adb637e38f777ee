"""Weight sync by disk: one Hugging Face folder per version, on a file system shared with the engines.

``DiskSync`` is the ``WeightSync`` of ``sync=disk``, and the fallback of the others. All ranks of the first
replica write in parallel: the all-gather gives each of them every tensor, and each writes its share to its
own files. Rank 0 first creates a temporary folder and finally renames it.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.config import EngineConfig
from bapo_megatron.config.transports import TRANSPORTS
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import for_servers, read_text_config
from bapo_megatron.hf.fp8 import without_quantization
from bapo_megatron.hf.parameter_map import OUTPUT
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.hf.weight_files import INDEX
from bapo_megatron.hf.weight_stream import WrittenShard, checked_weights, write_shards
from bapo_megatron.interfaces import Policy, Sampler, WeightSync
from bapo_megatron.rollout.engines.sent_weights import DigestingIterator, MakeDigester, SentDigests
from bapo_megatron.runtime.distributed import all_gather, is_main, on_all_ranks
from bapo_megatron.runtime.dotted_path import load_dotted_path
from bapo_megatron.runtime.files import remove_folder
from bapo_megatron.runtime.storage import OldFiles, writing

if TYPE_CHECKING:
    from bapo_megatron.rollout.sampler.client import SamplerClient

_VERSION = re.compile(r"v\d+|\.v\d+\.tmp|\.v\S+\.deleted")
"""Names of a version's folder, its temporary folder, and folders that could not be deleted."""


@dataclass(frozen=True, kw_only=True)
class SenderParts:
    """Argument of a sender's class, on every rank: settings, disk fallback, sampler client, GPUs, device."""

    engine: EngineConfig
    disk: DiskSync
    """The fallback: every engine loads a folder."""
    client: SamplerClient | None
    """Rank 0's client of the sampler process; None on other ranks."""
    gpus: Mapping[str, Sequence[int]]
    """GPU numbers of each server started by the run, by address; known only on rank 0."""
    device: torch.device
    """Device of this rank's weights."""
    on_event: Callable[[dict[str, Any]], None]
    make_digester: MakeDigester | None


def sender(parts: SenderParts) -> WeightSync:
    """Return a run's sender, on every rank: that of its transport in ``config/transports.py``."""
    path = TRANSPORTS[parts.engine.sync].sender
    if path is None:
        return parts.disk
    made: WeightSync = load_dotted_path("sync", path, "class")(parts)
    return made


class NoSync:
    """``WeightSync`` of a replay, in which nothing is sampled: sends nothing."""

    def push(self, policy: Policy, step: int) -> None:
        pass


class DiskSync:
    """``WeightSync`` by disk: ``push`` (collective) writes an HF folder, waits until the working engines have
    loaded it, and deletes older folders. If a rank cannot write, all ranks raise."""

    def __init__(
        self,
        sampler: Sampler | None,
        staging: WeightStaging,
        make_digester: MakeDigester | None,
    ) -> None:
        """``sampler``: None except on rank 0."""
        self._sampler, self._staging = sampler, staging
        self._make_digester = make_digester
        self._writers: list[int] = []  # ranks of the first replica, which write; empty before the first push

    def push(self, policy: Policy, step: int) -> None:
        """All-gather the weights, write them in rank 0's replica and make the engines load them."""
        folder = self._write(policy)
        on_all_ranks(lambda: self._load(folder, policy.version, step))

    def discard(self) -> None:
        """Delete the folders of all versions, so that no engine can load them."""
        if self._sampler is not None:
            self._staging.keep_only(None)

    def checked(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``, checked as in ``WeightStaging.checked``."""
        return self._staging.checked(weights)

    def _load(self, folder: Path, version: int, step: int) -> None:
        if self._sampler is not None:
            self._sampler.load_weights(folder, version, step)
            # Only now, because the pool revives engines with the previous version until the call above.
            self._staging.keep_only(folder)

    def _write(self, policy: Policy) -> Path:
        """Write ``policy.version`` and return its folder on every rank. All raise if one cannot write."""
        version, staging = policy.version, self._staging
        if not self._writers:
            replicas = all_gather(policy.data_rank)
            self._writers = [rank for rank, replica in enumerate(replicas) if replica == 0]
        on_all_ranks(lambda: staging.prepare(version) if is_main() else None)
        sent: list[SentDigests | None] = [None]

        def write_share() -> dict[str, WrittenShard]:
            weights = policy.hf_weights()
            try:
                if policy.data_rank != 0:
                    return {}
                watched = DigestingIterator(weights, self._make_digester if is_main() else None)
                writer = self._writers.index(dist.get_rank())
                written = staging.write_share(watched, version, writer, len(self._writers))
                sent[0] = watched.sent()
                return written
            finally:
                # Even after this rank's error, because the others wait in the same all-gathers.
                for _ in weights:
                    pass

        try:
            shares = on_all_ranks(write_share)
            files = {name: shard for share in shares for name, shard in share.items()}
            # After every rank has written: engines may load a folder as soon as it has its final name.
            on_all_ranks(lambda: staging.publish(version, files, sent[0]) if is_main() else None)
        finally:
            if is_main():
                staging.discard(version)
        return staging.folder(version)


class WeightStaging:
    """Writer of weight versions: HF folders that appear in ``folder`` atomically, by a rename.

    Call order: ``prepare`` on rank 0; ``write_share`` on every writer; ``publish`` on rank 0; then, even on
    error, ``discard``. The caller synchronizes the ranks.
    """

    def __init__(self, folder: Path, hf_path: Path, old: OldFiles | None = None) -> None:
        """``hf_path``: folder of the model's config.json and tensor shapes; ConfigError if it has no model.
        ``old``: deletes old versions."""
        self._old = old or OldFiles()
        reader, (family, config) = HfReader(hf_path), read_text_config(hf_path)
        self._folder, self._hf_path = folder, hf_path
        trained = [name for name in reader.names if not name.startswith(family.untrained)]
        self._shapes = {name: reader.shape(name) for name in trained}
        tied = config.get("tie_word_embeddings", False)
        self._aliases = {OUTPUT: f"{family.body}embed_tokens.weight"} if tied else {}
        if tied:
            self._shapes.pop(OUTPUT, None)  # some folders hold it twice

    def folder(self, version: int) -> Path:
        """Return a version's folder, which exists once it is published."""
        return self._folder / f"v{version}"

    def prepare(self, version: int) -> None:
        temporary, final = self._temporary(version), self.folder(version)
        with writing(f"weights of version {version}", final):
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in (temporary, final):
                self._remove(path)
            temporary.mkdir()
            config = (self._hf_path / "config.json").read_bytes()
            config = for_servers(without_quantization(config))  # the policy is not in fp8
            (temporary / "config.json").write_bytes(config)

    def write_share(
        self, weights: Iterable[tuple[str, Tensor]], version: int, writer: int, writers: int
    ) -> dict[str, WrittenShard]:
        """Check all ``weights``, write the share of one of ``writers``, and return its files by name. Raises
        ValueError unless ``weights`` are exactly the model's tensors, ConfigError if the folder is not
        shared, RunStopped if the disk fails."""
        temporary = self._temporary(version)
        if not temporary.is_dir():
            raise ConfigError(
                f"{temporary}, which rank 0 has made, is not there: the run directory must be on a disk that "
                f"the machines of all ranks share"
            )
        with writing(f"weights of version {version}", self.folder(version)):
            return write_shards(self.checked(weights), temporary, writer=writer, writers=writers)

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``, tied ones once. Raises ValueError, by their end, unless they are the model's."""
        return checked_weights(weights, self._shapes, self._aliases)

    def publish(
        self, version: int, files: Mapping[str, WrittenShard], sent: SentDigests | None = None
    ) -> None:
        """Check that all ``files`` are present, write their index, and rename the temporary folder. ``sent``:
        digests that engines must report after loading it. Raises ConfigError if a file is missing."""
        temporary, final = self._temporary(version), self.folder(version)
        with writing(f"weights of version {version}", final):
            for name, (size, _) in files.items():
                path = temporary / name
                actual = path.stat().st_size if path.is_file() else None
                if actual != size:
                    seen = "is not seen" if actual is None else f"has {actual} of its {size} bytes"
                    raise ConfigError(
                        f"{path} {seen} on rank 0's machine: the run directory must be on a disk that the "
                        f"machines of all ranks share"
                    )
            weight_map = {tensor: name for name, shard in files.items() for tensor in shard.tensors}
            (temporary / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
            # Last, so that a folder with the version's name is complete, including digests.
            if sent is not None:
                sent.write(temporary)
            temporary.rename(final)

    def discard(self, version: int) -> None:
        remove_folder(self._temporary(version), ignore_errors=True)

    def keep_only(self, folder: Path | None) -> None:
        """Delete all version folders except ``folder``."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path != folder and _VERSION.fullmatch(path.name):
                with self._old.deleting(path):
                    remove_folder(path)

    def _remove(self, path: Path) -> None:
        """Delete a leftover ``path``. It is renamed first, because its name must be free, and on NFS files
        that a server on this machine keeps open cannot be deleted."""
        if os.path.lexists(path):
            hidden = path.with_name(f".{path.name.strip('.')}.{uuid.uuid4().hex[:8]}.deleted")
            path.rename(hidden)
            with self._old.deleting(hidden):
                remove_folder(hidden)

    def _temporary(self, version: int) -> Path:
        return self._folder / f".v{version}.tmp"
