"""One export of a checkpoint beside the training, in a process of its own that no run has to wait for.

    python -m bapo_megatron.checkpoint.export_process CHECKPOINT OUTPUT MODEL PARENT

It imports no torch and moves bytes from file to file, so it takes tens of megabytes however large the model.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.processes import die_with_parent
from checkpoints_tools import Settings, to_hf

_NICENESS = 19
"""The last to get a processor, and, as the kernel derives one from the other, the last to get the disk."""
_THREADS = 2


def main(checkpoint: str, output: str, model: str, parent: str) -> int:
    """Write ``output`` from ``checkpoint``, with the files of the folder ``model``. The exit code.

    ``parent``: the process that waits for it; it ends with that.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half written is removed
    die_with_parent(parent=int(parent))  # or it would meet the export of the next trainer
    os.nice(_NICENESS)
    try:
        to_hf(
            Path(checkpoint), Path(output), Path(model), settings=Settings(overwrite=True, threads=_THREADS)
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
