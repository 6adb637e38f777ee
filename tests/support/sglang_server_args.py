"""SGLang's own reading of server flags on a machine that plays an H100. Run in SGLang's environment.

Reads ``{"lines": [[flag, ...], ...], "fields": [...]}`` from standard input: the flags of servers after
``sglang.launch_server``, and settings by name. Each line is parsed by the real ``ServerArgs``, and resolved
with all the checks that a server makes before it starts a process: flags that exclude each other, the context
against the model's, the backends of the platform. What those ask of the GPU is answered here: its kind and
its memory. Prints a JSON list: of each line the settings, or ``{"error": ...}``.
"""

import json
import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[2] / "bapo_megatron/rollout/engines/sglang_cpu"))

import stand_ins

stand_ins.install()

from sglang.srt.arg_groups import kv_shard_hook, memory_hook  # noqa: E402
from sglang.srt.runtime_context import override_platform  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402

H100 = {
    "is_cuda": True,
    "is_sm90": True,
    "is_hopper_with_cuda_12_3": True,
    "device_sm": 90,
    "device_capability": (9, 0),
    "has_flashinfer": True,
}
MEMORY_MB = 81_559
"""What nvidia-smi says of an H100."""


def resolved(argv: list[str]) -> dict[str, object]:
    """The settings of one server, as ``/server_info`` would report them."""
    try:
        arguments = prepare_server_args([*argv, "--device", "cuda"])
        arguments.resolve_once()
        return arguments.resolved_dict()
    except SystemExit:  # argparse, which has said why
        return {"error": f"argparse refuses {' '.join(argv)}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Read, resolve, print."""
    wanted = json.load(sys.stdin)
    for module in (memory_hook, kv_shard_hook):
        module.get_device_memory_capacity = lambda _device: MEMORY_MB
    with override_platform(**H100):
        found = [resolved(argv) for argv in wanted["lines"]]
    print(json.dumps([{k: v for k, v in one.items() if k in wanted["fields"]} for one in found]))


if __name__ == "__main__":
    main()
