"""The API key of a run: its file, and what a launched server does with it."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bapo_megatron.rollout.engines.sglang_launch as launch_folder
from bapo_megatron.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, SglangConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang import server_process as process
from bapo_megatron.rollout.engines.sglang.authorization import known_key, servers_key_file
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE, ApiKey, make_key_file, read_key_file

KEY, OTHER = "k" * 43, "o" * 43
FOLDER = Path(launch_folder.__file__).parent


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


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The launcher's ``access`` module, imported as in SGLang's environment: with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import access as found

    yield found
    for name in ("access", "api_key"):
        sys.modules.pop(name, None)


# --- the file


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


def without_modes(descriptor: int, _mode: int) -> None:
    os.chmod(descriptor, 0o777)


def test_a_file_system_that_keeps_no_modes_gets_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fchmod", without_modes)
    with pytest.raises(OSError, match=r"keeps no modes.*rollout\.sglang\.api_key_file"):
        servers_key_file(config_in(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    write_key(tmp_path / "api_key", mode=mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}.*chmod 600") as raised:
        known_key(SglangConfig(), tmp_path)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("text", ["", "short", "with a space in it, and long", "x" * 600, "zwölf" * 9])
def test_an_invalid_key_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    write_key(tmp_path / "api_key", text)
    with pytest.raises(ConfigError, match="must hold one line of 16 to 512") as raised:
        known_key(SglangConfig(), tmp_path)
    assert not text or text not in str(raised.value)


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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--api-key=secret", "--api-key", "--admin-api-key", "--api-k=secret"), "--.*api-k.* would show"),
        (
            ("--grpc-port=1", "--grpc-mode", "--smg-grpc-mode", "--encoder-only"),
            "--.*does not go with an API key",
        ),
    ],
)
def test_flags_that_do_not_go_with_a_key_are_refused(
    tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    for flag in flags:
        with pytest.raises(ConfigError, match=rf"rollout\.sglang\.flags: {says}") as raised:
            config_in(tmp_path, flags=(flag, "x")).check()
        assert "secret" not in str(raised.value)


# --- the server's command line and log


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


def test_no_log_record_shows_the_key(
    tmp_path: Path, access: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang writes all its settings into its log."""
    monkeypatch.setenv(VARIABLE, str(write_key(tmp_path / "api_key")))
    before = logging.getLogRecordFactory()
    try:
        access.install()
        logging.getLogger("x").warning(f"server_args={{'api_key': '{KEY}', 'port': 1}}")
        logging.getLogger("x").warning("%s: %d", {"api_key": KEY}, 3)
        logging.getLogger("x").warning("%s of %d", "all", 2)
    finally:
        logging.setLogRecordFactory(before)
    assert KEY not in caplog.text
    assert [record.getMessage() for record in caplog.records] == [
        *("server_args={'api_key': '***', 'port': 1}", "{'api_key': '***'}: 3", "all of 2")
    ]
