"""A Hugging Face folder to a Megatron checkpoint as other projects do it, by their documented interfaces.

    PYTHON -m benchmarks.peer_convert mbridge|megatron-bridge HF_DIR OUT

Runs in an environment that has them, in one process. Both build the model, of Transformer Engine's layers;
mbridge leaves saving to megatron-core. Only their refusals without a GPU have been seen.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def mbridge(hf_folder: Path, output: Path) -> None:
    """Weights into a megatron-core model, and that to a torch_dist folder."""
    import torch
    from mbridge import AutoBridge
    from megatron.core import dist_checkpointing, parallel_state

    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    [model] = AutoBridge.from_pretrained(str(hf_folder)).get_model(weight_path=str(hf_folder))
    output.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(output))


def megatron_bridge(hf_folder: Path, output: Path) -> None:
    """By its own command for that."""
    from megatron.bridge import AutoBridge

    AutoBridge.import_ckpt(str(hf_folder), str(output))


if __name__ == "__main__":
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
    }
    os.environ.update(alone)
    {"mbridge": mbridge, "megatron-bridge": megatron_bridge}[sys.argv[1]](*map(Path, sys.argv[2:]))
