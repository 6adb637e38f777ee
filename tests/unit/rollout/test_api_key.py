"""The API key of a run: its file, and what a launched server does with it."""

from __future__ import annotations

import os
import signal
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang import server_process as process
from bapo_megatron.rollout.engines.sglang.authorization import known_key, servers_key_file
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE, ApiKey, make_key_file, read_key_file
from tests.support.forked_commands import start_bapo
from tests.support.waiting import until

KEY, OTHER = "k" * 43, "o" * 43


def config_in(directory: Path, **sglang: Any) -> RunConfig:
    rollout = RolloutConfig(engine="sglang", sglang=SglangConfig(**sglang))
    return RunConfig("x", ModelConfig(Path("m")), DataConfig(Path("d")), rollout=rollout, run_dir=directory)


def write_key(path: Path, key: str = KEY, mode: int = 0o600) -> Path:
    path.write_text(key + "\n")
    path.chmod(mode)
    return path


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_key_is_random_and_its_file_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = servers_key_file(config_in(tmp_path / "run"))
    finally:
        os.umask(before)
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("api_key", 0o600)
    first = read_key_file(file).value
    assert len(first) >= 43  # 256 bits in base 64
    assert servers_key_file(config_in(tmp_path / "run")) == file
    assert read_key_file(file).value == first  # kept over resumes
    assert read_key_file(servers_key_file(config_in(tmp_path / "other"))).value != first
    assert [path.name for path in file.parent.iterdir()] == ["api_key"]


def test_one_of_many_concurrent_key_makers_wins(tmp_path: Path) -> None:
    def make(_number: int) -> str:
        make_key_file(tmp_path / "api_key")
        return read_key_file(tmp_path / "api_key").value

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(make, range(64)))) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("key", "mode", "says"),
    [
        (KEY, 0o640, "has mode 0640.*chmod 600"),
        (KEY, 0o604, "has mode 0604.*chmod 600.*name a file elsewhere with"),
        ("with a space in it, and long", 0o600, "must hold one line of 16 to 512"),
        ("zwölf" * 9, 0o600, "must hold one line"),
    ],
)
def test_a_key_that_is_public_or_invalid_is_refused_and_not_shown(
    tmp_path: Path, key: str, mode: int, says: str
) -> None:
    write_key(tmp_path / "api_key", key, mode)
    with pytest.raises(ConfigError, match=says) as raised:
        known_key(SglangConfig(), tmp_path)
    assert key not in str(raised.value)


def test_the_given_key_has_precedence_over_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's file, else the environment's, else the run's own, else none."""
    assert known_key(SglangConfig(), tmp_path) is None
    own = write_key(tmp_path / "api_key")
    assert known_key(SglangConfig(), tmp_path) == ApiKey(KEY, own)
    monkeypatch.setenv(VARIABLE, str(write_key(tmp_path / "second", OTHER)))
    assert known_key(SglangConfig(), tmp_path) == ApiKey(OTHER, tmp_path / "second")
    third = write_key(tmp_path / "third", "t" * 16)
    assert known_key(SglangConfig(api_key_file=third), tmp_path) == ApiKey("t" * 16, third)
    assert KEY not in repr(ApiKey(KEY, own))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        known_key(SglangConfig(api_key_file=tmp_path / "none"), tmp_path)


@pytest.mark.parametrize("flag", ["--api-k=secret", "--admin-api-key", "--grpc-port=1", "--encoder-only"])
def test_flags_that_do_not_go_with_a_key_are_refused(tmp_path: Path, flag: str) -> None:
    says = "would show" if "api" in flag else "does not go with an API key"
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.flags: --.*{says}") as raised:
        config_in(tmp_path, flags=(flag, "x")).check()
    assert "secret" not in str(raised.value)


def test_rollout_server_makes_the_key_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    became: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda _file, line, environment: became.append((line, environment)))
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.corp:3128")
    run = config_in(tmp_path / "run", python=Path(sys.executable))
    process.serve(process.ServeCommand(run, "10.0.0.7", 30001), cuda=False)
    [(line, environment)] = became
    key = read_key_file(tmp_path / "run/api_key").value
    assert environment[VARIABLE] == str(tmp_path / "run/api_key")
    assert environment[process.START_VARIABLE] == "900", (
        "a Slurm job's task ends a server that takes longer to start"
    )
    assert line[line.index("--host") + 1] == "10.0.0.7"
    assert "10.0.0.7" in environment["no_proxy"].split(",")
    assert line[line.index("--device") + 1] == "cpu"
    assert not [text for text in (*line, *environment.values()) if key in text]
    assert VARIABLE not in process.server_environment(cuda=False)
    assert key not in "".join(capfd.readouterr())


SERVER = """#!/bin/sh
touch "$TMPDIR/socket"
cd "${0%/*}"
ln -s "$TMPDIR" place
until [ -e go ]; do sleep 0.02; done
ls -d "$TMPDIR"
kill -9 $$
"""


def removers(folder: Path) -> list[psutil.Process]:
    """The process that shall remove it, once it is at its read, after which it would be done at once."""
    found = psutil.process_iter(["cmdline", "status"])
    waiting = [one for one in found if one.info["status"] == psutil.STATUS_SLEEPING]
    named = [one for one in waiting if str(folder) in (one.info["cmdline"] or ())]
    return [one for one in named if os.getsid(one.pid) == one.pid]


def test_rollout_server_leaves_no_folder_even_if_it_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(SERVER)
    program.chmod(0o755)
    flags = (f"--run-dir={tmp_path}", f"--rollout.sglang.python={program}")
    command = start_bapo("rollout-server", "recipes/demo_sglang_cpu.py", *flags)
    until((tmp_path / "place").is_symlink)
    folder = Path(os.readlink(tmp_path / "place"))
    until(lambda: not folder.exists() or removers(folder))
    for remover in removers(folder):
        for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm's, to each process of a step
            remover.send_signal(number)
    (tmp_path / "go").touch()
    assert Path(command.communicate(timeout=600)[0].decode().split()[-1]) == folder
    assert (command.wait(), folder.name[:5]) == (-9, "bapo-")
    until(lambda: not folder.exists())
