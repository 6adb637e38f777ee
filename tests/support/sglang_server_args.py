"""SGLang's own reading of server flags on a machine that plays an H100. Run in SGLang's environment.

Reads requests from standard input, one a line: ``{"lines": [[flag, ...], ...], "fields": [...], "platform":
{...}, "environment": {...}}``, the flags of servers after ``sglang.launch_server``, settings by name, what
SGLang's platform says other than of an H100 where it chooses kernels (``{"is_sm100": true}``: Blackwell), and
the servers' environment. A process that is forked for the request answers it. Each line is parsed by the real
``ServerArgs``, resolved with all the checks that a server makes before it starts a process (flags that
exclude each other, the context against the model's, the backends of the platform), and published; then SGLang
makes the backends of the CUDA graphs that its server would capture. Answers with a JSON list on one line: of
each line the settings with ``graphs``, the class of each phase's backend, or ``{"error": ...}``.

The H100 is played in torch, which every probe of SGLang asks in the end; answers that they remember from the
import are forgotten. Which graphs are the default is asked of ``utils.is_cuda``, what attention does of names
that modules have imported: one machine must answer all of them.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bapo_megatron/rollout/engines/sglang_cpu"))

import stand_ins

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # SGLang prints
stand_ins.install()

import sglang.srt.model_loader  # noqa: E402, F401 - with the layers, which import CUDA packages on an H100
import torch  # noqa: E402
from sglang.srt import platforms, runtime_context  # noqa: E402
from sglang.srt.model_executor.runner_backend import utils as graph_backends  # noqa: E402
from sglang.srt.platforms.cuda import CudaSRTPlatform  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402
from sglang.srt.utils import common  # noqa: E402

MEMORY_MB = 81_559
"""What nvidia-smi says of an H100."""
GPUS = 8
PROBES = {
    **dict.fromkeys(("is_cuda", "is_cuda_alike", "is_sm90_supported", "is_hopper_with_cuda_12_3"), True),
    **dict.fromkeys(("is_hip", "is_cpu", "is_npu", "is_xpu", "is_musa", "is_mps", "is_sail"), False),
    **dict.fromkeys(("is_sm100_supported", "is_sm120_supported", "is_blackwell_supported"), False),
    "is_flashinfer_available": True,
    "get_device_sm": 90,
    "get_device_capability": (9, 0),
    "get_device_count": GPUS,
    "get_device_name": "NVIDIA H100 80GB HBM3",
    "get_nvgpu_memory_capacity": MEMORY_MB,
}
"""Functions of ``sglang.srt.utils.common``, and what they answer on an H100."""


def play_h100() -> None:
    """Let torch, and with it SGLang wherever it asks, see eight H100s with CUDA 13."""
    torch.version.cuda = "13.0"
    about = SimpleNamespace(
        name=PROBES["get_device_name"],
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=MEMORY_MB << 20,
    )
    for name, answer in {
        "is_available": True,
        "device_count": GPUS,
        "get_device_name": about.name,
        "get_device_capability": (9, 0),
        "get_device_properties": about,
        "mem_get_info": (about.total_memory, about.total_memory),
    }.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    # What asks a driver, or for a package that no CPU needs.
    replace_everywhere("get_nvgpu_memory_capacity", lambda: MEMORY_MB)
    replace_everywhere("is_flashinfer_available", lambda: True)
    for remembered in vars(common).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()
    platforms._current_platform = CudaSRTPlatform()
    for module in modules():
        if hasattr(module, "current_platform"):
            module.current_platform = platforms._current_platform
        for name, value in PROBES.items():
            if isinstance(vars(module).get(f"_{name}"), bool):  # ``_is_cuda = is_cuda()`` of an import
                setattr(module, f"_{name}", value)


def modules() -> list[object]:
    return [one for name, one in sorted(sys.modules.items()) if name.startswith("sglang.") and one]


def replace_everywhere(name: str, function: object) -> None:
    """Put ``function`` in the place of a probe, also where a module has imported it by name."""
    old = getattr(common, name)
    for module in modules():
        for known, value in list(vars(module).items()):
            if value is old:
                setattr(module, known, function)


def doubters() -> list[str]:
    """The places where SGLang would still see another machine: ``module.name`` of each."""
    found = []
    for module in modules():
        for name, expected in PROBES.items():
            for known in (name, f"_{name}"):
                value = vars(module).get(known)
                if callable(value) and not isinstance(value, type):
                    value = value()
                if value is not None and value != expected:
                    found.append(f"{module.__name__}.{known} is {value}")
    return found


def resolved(argv: list[str]) -> dict[str, object]:
    """The settings of one server, as ``/server_info`` would report them, and its graphs' backends."""
    try:
        arguments = prepare_server_args([*argv, "--device", "cuda"])
        arguments.resolve_once()
        runtime_context.reset_context()
        runtime_context.publish(arguments, role="scheduler")
        return common.msgspec_to_builtins(arguments.resolved_dict()) | {"graphs": graphs()}
    except SystemExit:  # argparse, which has said why
        return {"error": f"argparse refuses {' '.join(argv)}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def graphs() -> dict[str, str]:
    """The backends that the published server's runners of CUDA graphs make for themselves, by phase."""
    model_runner = SimpleNamespace(device="cuda", server_args=runtime_context.get_server_args())
    runner = SimpleNamespace(model_runner=model_runner, device_module=torch.cuda)
    config = runtime_context.get_exec().graph.cuda_graph_config
    makers = {
        "decode": graph_backends.resolve_decode_backend,
        "prefill": graph_backends.resolve_prefill_backend,
    }
    with runtime_context.get_parallel().override(tp_group=SimpleNamespace()):
        return {
            phase: type(make(runner)).__name__
            for phase, make in makers.items()
            if config[phase].backend != "disabled"
        }


def answer(wanted: dict[str, Any]) -> int:
    """Resolve, print; the exit code: 1 if something would still see another machine."""
    os.environ.clear()
    os.environ.update(wanted["environment"])
    play_h100()
    with runtime_context.override_platform(**wanted["platform"]):
        found = [resolved(argv) for argv in wanted["lines"]]
    if doubting := doubters():  # after it, for modules that were imported on the way
        print("not everything sees an H100: " + ", ".join(doubting), file=sys.stderr, flush=True)
        return 1
    answers = [{name: one[name] for name in wanted["fields"] if name in one} for one in found]
    print(json.dumps(answers), file=ANSWERS, flush=True)
    return 0


def main() -> None:
    """A fork for each request, which ends without SGLang's clean-up; SystemExit with the first that fails."""
    for line in sys.stdin:
        if not (child := os.fork()):
            os._exit(answer(json.loads(line)))
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code)


if __name__ == "__main__":
    main()
