"""The servers of a run: those that the recipe names, or some that live as long as the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bapo_megatron.config import RunConfig
from bapo_megatron.distributed import free_port
from bapo_megatron.rollout.sglang.process import (
    ServerProcess,
    server_command,
    server_environment,
    server_flags,
    sglang_python,
)

_HOST = "127.0.0.1"


@contextmanager
def servers_of(config: RunConfig, cuda: bool) -> Iterator[list[str]]:
    """The addresses of servers that take requests. Those that the run starts itself end with it."""
    sglang = config.rollout.sglang
    if sglang.urls:
        yield list(sglang.urls)
        return
    with ExitStack() as running:
        started = []
        for number in range(sglang.servers):
            started.append(start_server(config, number, cuda))
            running.callback(started[-1].stop)
        for server in started:
            server.wait_ready(60 * sglang.start_minutes)
        yield [server.url for server in started]


def start_server(config: RunConfig, number: int, cuda: bool) -> ServerProcess:
    """Start server ``number`` of the run on this machine. Its log is in the run directory."""
    port = free_port()
    command = server_command(
        sglang_python(config.rollout.sglang.python),
        config.model.hf_path,
        _HOST,
        port,
        cuda,
        server_flags(config, number, cuda),
    )
    log = config.directory / "logs" / f"server-{number}.log"
    return ServerProcess(command, server_environment(cuda), f"http://{_HOST}:{port}", log)
