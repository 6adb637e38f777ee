"""Trial imports of ``bapo doctor``, in a child process: it imports modules and reports each outcome.

    python -m bapo_megatron.commands.doctor.probe MODULE ...

It prints one JSON object a line, right after each import, since the next import may hang or crash:
``{"module": ..., "error": null or text, "facts": {...}}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from bapo_megatron.runtime.device import gpu_problem, wants_cpu


def main(modules: Sequence[str]) -> None:
    """Import each module, in order, and print the outcome as a line of JSON."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the modules print must not mix with the JSON lines
    for name in modules:
        print(f"import {name}", file=sys.stderr, flush=True)  # names the module that crashes in silence
        error, facts = None, {}
        try:
            module = importlib.import_module(name)
            facts = {**torch_facts(module), **device_facts()} if name == "torch" else {}
        except BaseException as raised:  # packages raise everything, SystemExit too
            error = f"{type(raised).__name__}: {raised}"
        answers.write(json.dumps({"module": name, "error": error, "facts": facts}) + "\n")
        answers.flush()


def torch_facts(torch: Any) -> dict[str, Any]:
    """Facts about torch: `cuda` (None for a CPU build), `gpus` (name and GB of each), `nccl`."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        gpus.append([device.name, round(device.total_memory / 1e9)])
    nccl = torch.cuda.nccl.version() if gpus else None
    return {"cuda": torch.version.cuda, "gpus": gpus, "nccl": nccl and ".".join(map(str, nccl))}


def device_facts() -> dict[str, Any]:
    """Facts about the device: `asked`: BAPO_DEVICE asks for the CPU; `problem` of the GPU, or None."""
    return {"asked": wants_cpu(), "problem": gpu_problem()}


if __name__ == "__main__":
    main(sys.argv[1:])
