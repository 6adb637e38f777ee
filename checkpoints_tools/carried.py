"""Config, tokenizer and licence files of a Hugging Face folder, which a conversion copies along unchanged.

CheckpointError for a link that leads out of the folder. ``to_hf``, ``to_megatron`` and ``reshard`` call it.
Used by ``resharding.py``, ``to_hf.py`` and ``to_megatron.py``.
"""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.runtime.files import CHAT_TEMPLATES, check_files_inside
from checkpoints_tools.formats.safetensors_folder import INDEX

FOLDER = "hf"
"""Name of their folder in a Megatron checkpoint."""

_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # of SentencePiece
    "*.tiktoken",
    "chat_template*",
    f"{CHAT_TEMPLATES}/*",
    "LICENSE*",
    "NOTICE*",
    "README*",
    "USE_POLICY*",
)


def carried_files(folder: Path) -> dict[str, Path]:
    """Config, tokenizer, chat templates and licence of a model, by their paths in the folder.

    CheckpointError for a link to a file outside of it, which would become part of the copy.
    """
    check_files_inside(folder)
    files = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path for path in sorted(files)}


def carried_beside(folder: Path, checkpoint: Path) -> dict[Path, Path]:
    """``carried_files`` and the index of a sharded model, by their paths in a Megatron checkpoint.

    The index keeps the division into safetensors files for a conversion back.
    """
    carried = carried_files(folder)
    if (folder / INDEX).is_file():
        carried[INDEX] = folder / INDEX
    return {checkpoint / FOLDER / name: path for name, path in carried.items()}
