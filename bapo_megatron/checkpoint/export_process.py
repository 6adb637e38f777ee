"""Export process of a run: converts one checkpoint to a Hugging Face folder while training continues.

    python -m bapo_megatron.checkpoint.export_process CHECKPOINT OUTPUT MODEL PARENT

Started by ``step_exports.py``, and killed when the trainer ends. It imports no torch and copies bytes from
file to file, so it needs tens of megabytes for a model of any size. The output appears whole or not at all.
Exit code 2, with the reason on stderr, for a checkpoint or folder that it refuses.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.processes import die_with_parent
from bapo_megatron.runtime.written_folders import move_foreign_aside
from checkpoints_tools import Settings, to_hf
from checkpoints_tools.core.atomic_output import foreign, replaced_folder

_NICENESS = 19
"""The lowest CPU priority; the kernel derives the disk priority from it."""
_THREADS = 2


def main(checkpoint: str, output: str, model: str, parent: str) -> int:
    """Convert ``checkpoint`` to the HF folder ``output``, with config and tokenizer of ``model``.

    ``parent``: process id of the trainer, with which this process ends. Returns the exit code.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the half-written output is removed on the way
    die_with_parent(parent=int(parent))  # else a restarted trainer could export to the same folder at once
    os.nice(_NICENESS)
    try:
        # Outputs with somebody's files, or of an earlier version without a mark, are renamed and kept. The
        # replaced folder only where the output exists: else `to_hf` gives it the output's name again.
        if os.path.lexists(output):
            move_foreign_aside(replaced_folder(Path(output)), foreign)
        move_foreign_aside(Path(output), foreign)
        to_hf(
            Path(checkpoint), Path(output), Path(model), settings=Settings(overwrite=True, threads=_THREADS)
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
