"""API-key authentication of a real SGLang server. (The router's: test_router.py.)"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from bapo_megatron.rollout.engines.sglang.authorization import Authorization
from bapo_megatron.rollout.engines.sglang.server_process import ServerProcess
from bapo_megatron.rollout.engines.sglang_launch.api_key import make_key_file, read_key_file
from bapo_megatron.types import GenerateRequest, SamplingParams

from .conftest import FLAGS, engine_on, start_server

pytestmark = pytest.mark.slow

GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
ENDPOINTS: dict[str, Any] = {
    "/generate": GENERATE,
    "/update_weights_from_disk": {"model_path": "/nowhere", "weight_version": "9"},
    "/update_weight_version": {"new_version": "9"},
    "/init_weights_update_group": {},
    "/update_weights_from_tensor": {},
    "/begin_weight_update": {},
    "/weights_checker": {"action": "checksum"},
    "/pause_generation": {"mode": "in_place"},
    "/abort_request": {"abort_all": True},
    "/model_info": None,
    "/server_info": None,
}
"""What each gets; None: it is read."""


@dataclass(frozen=True)
class Keyed:
    """A server, the folder of its key and log, and its model."""

    process: ServerProcess
    folder: Path
    model: Path

    @property
    def key(self) -> str:
        return read_key_file(self.folder / "api_key").value


def call(url: str, path: str, body: Any = None, key: str | None = None) -> int:
    """The status of one call of any program."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def server(
    sglang: Path, make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    """One server for all tests of this file."""
    folder, model = tmp_path_factory.mktemp("run"), make_model("qwen2")
    make_key_file(folder / "api_key")
    # With its warm-up, in which it calls itself.
    process = start_server(model, folder, FLAGS[:-1], folder / "api_key")
    try:
        process.wait_ready()
        yield Keyed(process, folder, model)
    finally:
        process.stop(seconds=1)


def test_sampling_and_weight_updates_need_the_key(server: Keyed, tmp_path: Path) -> None:
    url, key = server.process.url, read_key_file(server.folder / "api_key")
    authorization = Authorization(url, lambda: key, is_required=True)
    engine = engine_on(url, server.model, tmp_path / "weights", authorization=authorization)
    try:
        engine.update_weights(load_file(server.model / "model.safetensors").items(), 3)
        for wrong in (None, "o" * 43):
            found = {path: call(url, path, body, wrong) for path, body in ENDPOINTS.items()}
            assert found == dict.fromkeys(ENDPOINTS, 401)
        assert engine.weight_version == 3
        asked = GenerateRequest("r", np.array([1, 2, 3]), SamplingParams(1.0, 4, ()))
        [answer] = engine.generate([asked])
        assert (len(answer.token_ids_R), set(answer.versions_R)) == (4, {3})
    finally:
        engine.close()
    assert call(url, "/generate", GENERATE, server.key) == 200
    assert (call(url, "/ready"), call(url, "/health")) == (200, 200)


def test_a_client_with_another_key_cannot_register(server: Keyed, tmp_path: Path) -> None:
    """A job's shell registers a server when this command ends with 0."""
    make_key_file(tmp_path / "api_key")
    module = "bapo_megatron.rollout.engines.sglang.authorization"
    for folder, code in ((server.folder, 0), (tmp_path, 1)):
        command = [sys.executable, "-m", module, server.process.url, str(folder / "api_key")]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == code


def test_the_key_is_neither_in_its_log_nor_in_the_list_of_processes(server: Keyed) -> None:
    log = server.process.log.read_text()
    assert "server_args=" in log
    assert "'api_key': '***'" in log
    assert server.key not in log
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(processes) >= 3
    for one in processes:
        assert server.key not in " ".join(one.cmdline()) + str(one.environ())
