"""The ``sglang`` backend: SGLang servers, started by the run or running already, and their HTTP clients.

It imports what needs torch where it is called: ``bapo plan`` asks for the backend by its name, and must
answer at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.interfaces import Engine
from bapo_megatron.rollout.engines.backend import EngineBackend, EngineServers, OnEvent
from bapo_megatron.rollout.engines.requests import limits_of
from bapo_megatron.rollout.engines.sent_weights import MakeDigester, UnknownDigests
from bapo_megatron.rollout.engines.sglang.authorization import Authorization, check_keys_asked, known_key
from bapo_megatron.rollout.engines.sglang.engine import Deadlines, SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, SglangServer
from bapo_megatron.rollout.engines.sglang.requirements import check_nccl, nccl_settings, placement_problem
from bapo_megatron.rollout.engines.sglang.server_process import more_flags, sglang_python
from bapo_megatron.rollout.engines.sglang.supervisor import servers_of


class SglangBackend(EngineBackend):
    """The factory of SGLang engines: servers reached over HTTP, started by the run or named in its recipe."""

    returns_routes = True

    def check(self, rollout: RolloutConfig, gpus: int = 0, training: int = 0) -> None:
        """Check SGLang's installation, API keys, GPU placement and, for sync=broadcast, NCCL's version.

        ConfigError names what is wrong. Servers that run elsewhere are assumed to have the NCCL of the
        environment that is named here.
        """
        python = _interpreter(rollout)
        check_keys_asked(rollout.sglang)
        if gpus and python and rollout.sglang.sync == "broadcast":
            check_nccl(python)
        if gpus and (problem := placement_problem(rollout, gpus, training)):
            raise ConfigError(problem)

    def prepare_process(self, rollout: RolloutConfig, cuda: bool) -> None:
        """For sync=broadcast on GPUs: NCCL's settings of the servers, which are in one group with rank 0."""
        if cuda and rollout.sglang.sync == "broadcast":
            for name, value in nccl_settings(rollout.sglang.flags).items():
                os.environ.setdefault(name, value)

    def check_weights(self, hf_path: Path) -> None:
        """Refuse fused experts and quantized folders, with ConfigError.

        SGLang passes over tensors whose names it does not know, and would put bfloat16 into fp8 layers.
        """
        from bapo_megatron.hf.fp8 import is_quantized
        from bapo_megatron.hf.reader import HfReader

        if is_quantized(hf_path):
            raise ConfigError(
                f"model.hf_path={hf_path} is quantized: servers would load it into fp8 layers, which the "
                "weights of the policy, in bfloat16, do not fit; make a folder in bfloat16 of it, with "
                "bapo-ckpt to-megatron and to-hf"
            )
        if fused := HfReader(hf_path).fused_experts:
            raise ConfigError(
                f"model.hf_path={hf_path} holds fused experts ({fused[0]}), which SGLang would leave random: "
                "write a tensor for each expert, with bapo-ckpt to-megatron and to-hf"
            )

    def serve(
        self, config: RunConfig, cuda: bool, on_event: OnEvent
    ) -> AbstractContextManager[EngineServers]:
        return servers_of(config, cuda, on_event)

    def has_prefix_cache(self, rollout: RolloutConfig) -> bool:
        return "--disable-radix-cache" not in more_flags(rollout.sglang)

    def weight_digester(self, rollout: RolloutConfig, hf_path: Path, device: str) -> MakeDigester | None:
        """The factory of the digests of fused weights; servers must be on the trainer's kind of device."""
        sglang = rollout.sglang
        if not sglang.compare_digests:
            return partial(UnknownDigests, "rollout.sglang.compare_digests is false")
        from bapo_megatron.rollout.engines.sglang.fused_weights import fused_digests

        return partial(fused_digests, hf_path, sglang.tensor, device, sglang.flags)

    async def open(
        self, config: RunConfig, urls: Sequence[str], device: str, opened: AsyncExitStack
    ) -> list[Engine]:
        sglang, limits = config.rollout.sglang, limits_of(config.model.hf_path)
        sessions = HttpSessions()
        opened.push_async_callback(sessions.close)
        deadlines = Deadlines(60 * sglang.request_minutes, update_s=60 * sglang.update_minutes)

        def server_at(url: str) -> SglangServer:
            authorization = Authorization(
                url,
                lambda: known_key(sglang, config.directory),
                sglang.require_api_key,
                is_own=not sglang.urls,
            )
            return SglangServer(url, sessions, authorization=authorization)

        return [
            SglangEngine(server_at(url), limits, sglang.on_update, deadlines, sglang.tensor) for url in urls
        ]


def _interpreter(rollout: RolloutConfig) -> Path | None:
    """SGLang's interpreter; None if there is none and the run starts no servers, else ConfigError."""
    try:
        return sglang_python(rollout.sglang.python)
    except ConfigError:
        if rollout.sglang.urls:
            return None
        raise
