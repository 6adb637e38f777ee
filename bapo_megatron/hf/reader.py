"""Reader of a Hugging Face folder: tensors by name, one at a time, from one safetensors file or many.

ConfigError for a folder or file that cannot be read; no link may lead out of the folder. The policy loads
its initial weights by it. Used in ``policy/``, ``planning/rehearsal/``, ``rollout/engines/sglang/`` and
``trainer/``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape, missing_file
from bapo_megatron.hf.parameter_map import expert_tensors, hf_tensors, is_fused_experts
from bapo_megatron.runtime.files import check_files_inside, file_inside, read_file_inside

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ALL = slice(None)


class TensorReader(Protocol):
    """Reader protocol: gives a model's tensors by their Hugging Face names, when a policy is built."""

    def read(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Rows and columns of one tensor, as stored; all of it where they are not given."""


class HfReader:
    """Reader of one Hugging Face folder; files are opened when first needed, and stay open.

    ``read`` reads only the asked rows and columns. ``check`` compares the folder with a model's shape. Made
    by ``MegatronPolicy`` to load its weights and the reference's, and by checks as ``trainer/preflight.py``.
    Fused experts are read as the tensors of each expert.
    """

    def __init__(self, folder: Path) -> None:
        check_files_inside(folder)
        self.folder = folder
        self._open_files: dict[str, safe_open] = {}
        self._file_of = self._locate()
        self._within: dict[str, tuple[str, int, slice]] = {}
        """Where an expert's tensor lies in a fused one: its name, expert and rows."""
        self.fused_experts = [name for name in self._file_of if is_fused_experts(name)]
        """Names of the fused tensors, which SGLang would pass over."""
        for fused in self.fused_experts:
            for name, place in expert_tensors(fused, self.shape(fused)).items():
                self._within[name] = (fused, *place)
                self._file_of[name] = self._file_of[fused]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from its file's header."""
        if name in self._within:
            fused, _, rows = self._within[name]
            return rows.stop - rows.start, self._stored(fused).get_shape()[2]
        return tuple(self._stored(name).get_shape())

    def read(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Rows and columns of one tensor, as stored; no other bytes of it are read."""
        if name in self._within:
            fused, expert, own = self._within[name]
            first, last, _ = rows.indices(own.stop - own.start)
            part: Tensor = self._stored(fused)[expert, own.start + first : own.start + last, columns]
            return part
        stored = self._stored(name)
        tensor: Tensor = stored[rows] if columns == _ALL else stored[rows, columns]
        return tensor

    def _stored(self, name: str) -> Any:
        """The slices of a tensor that the files hold under this name."""
        return self._file(self._file_of[name]).get_slice(name)

    def check(self, shape: ModelShape) -> None:
        """Check the folder: ConfigError with each missing tensor, unknown tensor and wrong shape."""
        expected = hf_tensors(shape)
        known = set(self._file_of) - set(self.fused_experts)
        # Tied models are often stored with a copy of the embedding under the name of the output layer.
        extra = known - set(expected) - ({"lm_head.weight"} if shape.tied else set())
        problems = [f"tensor {name} is missing" for name in expected if name not in known]
        problems += [f"tensor {name} is not of this model family" for name in sorted(extra)]
        problems += [
            f"tensor {name} has shape {list(self.shape(name))}, config.json asks for {list(wanted)}"
            for name, wanted in expected.items()
            if name in known and self.shape(name) != wanted
        ]
        if problems:
            more = f"\n... and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ConfigError(f"model folder {self.folder}:\n" + "\n".join(problems[:8]) + more)

    def _locate(self) -> dict[str, str]:
        index = self.folder / _INDEX
        if index.exists():
            try:
                weight_map = json.loads(read_file_inside(self.folder, _INDEX))["weight_map"]
                files = {str(name): file_inside(self.folder, file).name for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(f"{index} cannot be read: {error!r:.200}") from None
            if not files:
                raise ConfigError(f"{index} lists no tensors")
            return files
        if (self.folder / _SINGLE).exists():
            return dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        raise ConfigError(f"model.hf_path={self.folder} holds neither {_SINGLE} nor {_INDEX}")

    def _file(self, filename: str) -> safe_open:
        if filename not in self._open_files:
            path = self.folder / filename
            if not path.is_file():
                first, *rest = sorted(name for name, file in self._file_of.items() if file == filename)
                raise ConfigError(missing_file(path, first, len(rest)))
            try:
                self._open_files[filename] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from None
        return self._open_files[filename]
