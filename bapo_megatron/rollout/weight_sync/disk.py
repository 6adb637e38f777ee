"""Weight sync through a folder that trainer and engines both see: one HF folder for each version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.stream_writer import write_shards
from bapo_megatron.hf.weight_check import checked_weights
from bapo_megatron.interfaces import Policy, Sampler
from bapo_megatron.runtime.distributed import share
from bapo_megatron.runtime.storage import writing


class DiskSync:
    """The ``WeightSync`` (see interfaces.py) through files.

    On every rank but 0, ``sampler`` and ``staging`` are None.
    """

    def __init__(self, sampler: Sampler | None, staging: WeightStaging | None) -> None:
        """Collective. In a replay nothing is sampled: ``staging`` is None on rank 0 too."""
        self._sampler, self._staging = sampler, staging
        self._is_needed = share(staging is not None)

    def push(self, policy: Policy, step: int) -> None:
        """Gather the weights within rank 0's replica, write them, and have the engines load them."""
        if not self._is_needed or policy.data_rank != 0:
            return
        weights = policy.hf_weights()
        if self._sampler is not None and self._staging is not None:
            folder = self._staging.write(weights, policy.version)
            self._sampler.load_weights(folder, policy.version, step)
            self._staging.keep_only(folder)
        for _ in weights:  # the other ranks take part in the gathering
            pass


class WeightStaging:
    """HF folders of the model's versions, in ``folder``: each is whole, or not there."""

    def __init__(self, folder: Path, hf_path: Path) -> None:
        config_file = hf_path / "config.json"
        if not config_file.is_file():
            raise ConfigError(f"model.hf_path={hf_path}: no config.json there; give a Hugging Face folder")
        config = json.loads(config_file.read_text())
        self._folder, self._hf_path = folder, hf_path
        self._shapes = _tensor_shapes(hf_path)
        tied = config.get("tie_word_embeddings", False)
        self._aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        if tied:
            self._shapes.pop("lm_head.weight", None)  # some folders hold it twice

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """The folder with exactly the model's tensors. ValueError if they are not; then nothing remains.

        RunStopped if the disk does not take them; nothing remains then either.
        """
        final = self._folder / f"v{version}"
        with writing(f"weights of version {version}", final):
            self._write(weights, final)
        return final

    def keep_only(self, folder: Path) -> None:
        """Delete the other versions."""
        for path in self._folder.iterdir():
            if path != folder:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, weights: Iterable[tuple[str, Tensor]], final: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{final.name}.tmp"
        for path in (temporary, final):
            shutil.rmtree(path, ignore_errors=True)
        temporary.mkdir()
        try:
            shutil.copyfile(self._hf_path / "config.json", temporary / "config.json")
            write_shards(checked_weights(weights, self._shapes, self._aliases), temporary)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _tensor_shapes(hf_path: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(hf_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ConfigError(f"model.hf_path={hf_path}: no safetensors files there")
    return shapes
