"""Commands of ``bapo-ckpt``, ``COMMANDS`` by name: their flags, and their calls of the Python API.

Each is a dataclass of parsed arguments, whose ``run`` prints the result and returns the exit code. ``cli.py``
parses and runs them. Inspection and verification are imported on use, to speed up the start of conversions.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bapo_megatron.errors import ConfigError, printable
from checkpoints_tools.conversion import Conversion, Settings
from checkpoints_tools.hf_to_megatron import reshard, to_megatron
from checkpoints_tools.megatron_to_hf import to_hf


@dataclass(frozen=True)
class Flags(Settings):
    """Flags of every command that writes: overwrite, dry run, threads."""

    progress: tyro.conf.Suppress[bool] = True


@dataclass(frozen=True)
class ToMegatron:
    """Convert a Hugging Face folder to a torch_dist checkpoint that megatron-core loads at any layout."""

    hf_dir: tyro.conf.Positional[Path]
    """Folder of the model: config.json and safetensors."""
    out: tyro.conf.Positional[Path]
    """Folder to write; it appears when it is whole."""
    grid: int = 8
    """Pieces of each matrix: the largest TP that is to read no more than its part."""
    flags: tyro.conf.OmitArgPrefixes[Flags] = field(default_factory=Flags)

    def run(self) -> int:
        """Convert, and print what was written."""
        _tell(to_megatron(self.hf_dir, self.out, self.grid, self.flags))
        return 0


@dataclass(frozen=True)
class ToHf:
    """Convert a checkpoint of Megatron-LM, or of a run, to a Hugging Face folder."""

    checkpoint: tyro.conf.Positional[Path]
    """Its folder or one above it, of Megatron-LM or of a run."""
    out: tyro.conf.Positional[Path]
    """Folder to write; it appears when it is whole."""
    hf_reference: Path | None = None
    """Folder of the model with config.json and tokenizer, where the checkpoint carries none."""
    dtype: Literal["bf16"] | None = None
    """Round to this type; without it every bit stays."""
    origin: Annotated[Literal["model", "optimizer"], tyro.conf.arg(name="from")] = "model"
    """The model's weights, or the optimizer's in fp32."""
    step: str = "latest"
    """Which checkpoint, if there are several: a number, or latest."""
    shard_gb: float | None = None
    """Most gigabytes of a file; without it the files are those of the model's own folder."""
    quantize: Literal["fp8-block"] | None = None
    """Write matrices in fp8 with scales of 128 x 128 blocks, and all else in bf16."""
    flags: tyro.conf.OmitArgPrefixes[Flags] = field(default_factory=Flags)

    def run(self) -> int:
        """Convert, and print what was written."""
        if self.shard_gb is not None and not self.shard_gb > 0:
            raise ConfigError(f"--shard-gb {self.shard_gb}: give a number above 0")
        shard_bytes = None if self.shard_gb is None else int(self.shard_gb * 1e9)
        result = to_hf(
            self.checkpoint,
            self.out,
            self.hf_reference,
            self.dtype,
            self.origin,
            self.step,
            shard_bytes,
            self.flags,
            self.quantize,
        )
        _tell(result)
        return 0


@dataclass(frozen=True)
class Inspect:
    """Print a checkpoint's format, model, optimizer and keys. Reads only metadata, no weights."""

    path: tyro.conf.Positional[Path]
    """Folder of a checkpoint, a model or a run."""
    json: bool = False
    """Print all of it as JSON."""
    hf_reference: Path | None = None
    """Folder of the model with config.json, where the checkpoint carries none."""
    step: str = "latest"
    """Which checkpoint, if there are several: a number, or latest."""

    def run(self) -> int:
        """Inspect the checkpoint, and print the result."""
        from checkpoints_tools.inspection import as_text, inspect_checkpoint

        inspection = inspect_checkpoint(self.path, self.step, self.hf_reference)
        print(dumps(inspection.as_json(), indent=2) if self.json else printable(as_text(inspection)))
        return 0


@dataclass(frozen=True)
class Verify:
    """Compare two checkpoints, of any formats, bit for bit: exit code 0 if they hold the same model, else 1.

    With one path, a run's checkpoint: whether every file is as it was written (0), or damaged (1).
    """

    first: tyro.conf.Positional[Path]
    """Folder of a checkpoint, a model or a run."""
    second: tyro.conf.Positional[Path | None] = None
    """Another; without it the files of the first are compared with its manifest."""
    json: bool = False
    """Print all of it as JSON, with every difference."""
    digests: bool = False
    """Print the SHA-256 of every tensor's elements."""
    weights_only: bool = False
    """Leave the optimizer's state out."""
    hf_reference: Path | None = None
    """Folder of the model with config.json, where neither checkpoint carries one."""
    step: str = "latest"
    """Which checkpoint, if there are several: a number, or latest."""
    threads: int = 0
    """Threads that read; 0 for one per processor, but 4 to 8."""

    def run(self) -> int:
        """Compare, and print what was found."""
        settings = Settings(threads=self.threads, progress=not self.json)
        if self.second is None:
            return self._run_on_files(settings)
        from checkpoints_tools.verification import verify

        verification = verify(
            self.first, self.second, self.hf_reference, self.step, self.digests, self.weights_only, settings
        )
        print(dumps(verification.as_json(), indent=2) if self.json else printable(str(verification)))
        return 0 if verification.equal else 1

    def _run_on_files(self, settings: Settings) -> int:
        if self.digests or self.weights_only or self.hf_reference:
            raise ConfigError(
                "--digests, --weights-only and --hf-reference are for two checkpoints: give a second path"
            )
        from checkpoints_tools.verification import verify_files

        verification = verify_files(self.first, self.step, settings)
        print(dumps(verification.as_json(), indent=2) if self.json else printable(str(verification)))
        return 1 if verification.damaged else 0


@dataclass(frozen=True)
class Reshard:
    """Rewrite a checkpoint in another grid of chunks, or with another padding of the vocabulary.

    The trainer loads torch_dist at any TP, PP, VPP, CP and DP as it is: that needs no reshard.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Its folder or one above it, of Megatron-LM or of a run."""
    out: tyro.conf.Positional[Path]
    """Folder to write; it appears when it is whole."""
    grid: int = 8
    """Pieces of each matrix: the largest TP size at which a rank reads only its part."""
    vocab_multiple: int | None = None
    """Pad the vocabulary to a multiple; without it, it is not padded."""
    weights_only: bool = False
    """Leave the optimizer behind."""
    hf_reference: Path | None = None
    """Folder of the model with config.json and tokenizer, where the checkpoint carries none."""
    step: str = "latest"
    """Which checkpoint, if there are several: a number, or latest."""
    flags: tyro.conf.OmitArgPrefixes[Flags] = field(default_factory=Flags)

    def run(self) -> int:
        """Convert, and print what was written."""
        result = reshard(
            self.checkpoint,
            self.out,
            self.grid,
            self.vocab_multiple,
            self.weights_only,
            self.hf_reference,
            self.step,
            self.flags,
        )
        _tell(result)
        return 0


def _tell(result: Conversion) -> None:
    """Print what was written. Failing to print is not an error: the output exists."""
    with suppress(OSError):
        print(printable(str(result)), flush=True)


COMMANDS: dict[str, type[ToMegatron | ToHf | Reshard | Inspect | Verify]] = {
    "to-megatron": ToMegatron,
    "to-hf": ToHf,
    "reshard": Reshard,
    "inspect": Inspect,
    "verify": Verify,
}
