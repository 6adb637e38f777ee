"""A ``bapo`` command whose policy is on Transformer Engine's layers, on a CPU.

``python -m tests.support.te_bapo VERSION COUNTS COMMAND ...`` runs the command in one process, and writes how
often it has called each kernel to the file COUNTS.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> int:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from bapo_rehearsal.te_sources import find_sources
    from bapo_rehearsal.transformer_engine import extension
    from bapo_rehearsal.transformer_engine.installation import install

    version, counts, *arguments = sys.argv[1:]
    install(find_sources(version))
    from bapo_megatron import cli
    from bapo_megatron.policy import device
    from tests.support.te_process import take_float32

    take_float32()
    device.uses_transformer_engine = lambda _dtype: True
    device.use_torch_optimizer = lambda: None

    try:
        return cli.run(arguments)
    finally:
        Path(counts).write_text(json.dumps(extension.calls))


if __name__ == "__main__":
    sys.exit(main())
