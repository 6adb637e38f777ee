"""``bapo doctor``: rows of rollout servers (a fake HTTP server) and of recipes."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bapo_megatron.commands.doctor import servers
from bapo_megatron.commands.doctor.recipe import RecipeFacts, facts_of, problems_of, recipe_rows
from bapo_megatron.commands.doctor.rows import DoctorRow
from bapo_megatron.commands.doctor.servers import get, server_rows
from bapo_megatron.config import RunConfig, SourceConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.runtime.http import Answer, is_loopback
from bapo_megatron.trainer.preflight import check_weights

ROOT = Path(__file__).parents[3]
KEY = "k" * 43


class Played:
    """Answers like SGLang 0.5.23, or with given answers: path to status and body."""

    url = "http://127.0.0.1:30000"

    def __init__(self) -> None:
        self.key: str | None = KEY
        about = {"model_path": "models/tiny", "weight_version": "0"}
        server = {"disable_radix_cache": False, "disable_overlap_schedule": False}
        self.answers: dict[str, tuple[int, Any]] = {"/ready": (200, "")}
        self.answers |= {"/model_info": (200, about), "/server_info": (200, server)}
        self.keys: list[str | None] = []
        """The authorization of each request."""

    def get(self, url: str, *, headers: Mapping[str, str] | None = None) -> Answer:
        self.keys.append((headers or {}).get("Authorization"))
        path = url.removeprefix(self.url)
        status, body = self.answers.get(path, (404, ""))
        if self.key and path.endswith("_info") and self.keys[-1] != f"Bearer {self.key}":
            status = 401
        return Answer(status, "", (body if isinstance(body, str) else json.dumps(body)).encode())


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key that the environment names."""
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(file))
    return file


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(servers, "get", played.get)
    return played


def facts(*urls: str, **more: Any) -> RecipeFacts:
    return RecipeFacts(**{"directory": "runs/demo", "on_update": "retract", "urls": list(urls), **more})


def bad(rows: Iterator[DoctorRow]) -> list[DoctorRow]:
    return [row for row in rows if row.state != "ok"]


def test_a_server_that_fits(server: Played, key_file: Path) -> None:
    rows = list(server_rows(facts(server.url + "/")))
    assert {(row.section, row.name, row.state) for row in rows} == {("servers", server.url, "ok")}
    assert [row.found for row in rows] == [
        "ready",
        f"asks for the API key in {key_file}",
        "weight version 0",
    ]


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # what the server says instead, what the recipe says instead, found
    ({"weight_version": "default"}, {}, "weight version 'default'"),
    # What a run refuses at its first load; the other settings of that check: test_sglang_failures.py.
    ({"disable_overlap_schedule": True}, {"on_update": "in_place"}, "would be refused by the run"),
    ({"speculative_algorithm": "EAGLE"}, {"sync": "broadcast"}, "would be refused by the run"),
]


@pytest.mark.parametrize(("says", "recipe", "found"), CASES)
def test_a_server_that_does_not_fit(
    server: Played, says: dict[str, Any], recipe: dict[str, Any], found: str
) -> None:
    path = "/model_info" if "weight_version" in says else "/server_info"
    server.answers[path] = (200, {**server.answers[path][1], **says})
    (row,) = bad(server_rows(facts(server.url, **recipe)))
    assert row.state == "problem"
    assert found in row.found
    assert row.needed
    assert row.fix


def test_what_is_no_server(server: Played) -> None:
    """Malformed answers are no traceback. One that pauses, a router: tests/contract/test_router.py."""
    server.answers |= {"/model_info": (200, ["hello"]), "/server_info": (500, "<html>")}
    rows = list(server_rows(facts(server.url)))
    assert [row.state for row in rows] == ["ok", "ok", "problem"]  # no weight version
    server.answers = {}
    (row,) = server_rows(facts(server.url))
    assert (row.state, row.found) == ("problem", "answers, and has no /ready")
    assert list(server_rows(facts())) == list(server_rows(facts("localhost:3000"))) == []


def test_servers_that_are_gone_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get, "__defaults__", (4.0,))  # the first answers at once, also on a busy machine
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes the call, and says nothing
        hanging = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gone = f"http://127.0.0.1:{free_port()}"
        began = time.monotonic()
        rows = list(server_rows(facts(gone, hanging)))
    assert time.monotonic() - began < 20
    assert [row.name for row in rows] == [gone, hanging]
    assert "Connection refused" in rows[0].found
    assert rows[1].found in ("no answer: timed out", "no answer: no answer within 4 s")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., RunConfig]:
    config = load_recipe(ROOT / "recipes/demo_sglang_cpu.py", RunConfig)

    def changed(**fields: Any) -> RunConfig:
        return dataclasses.replace(config, run_dir=tmp_path / "run", **fields)

    return changed


def test_mistakes_of_every_kind_are_told_at_once(demo: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Wrong fields, in their own words alone, absent models, files of sources and suites."""
    config, none = demo(), tmp_path / "none"
    sources = tuple(SourceConfig(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    wrong = {
        "steps": 0,
        "seed": -1,
        "model": dataclasses.replace(config.model, hf_path=none),
        "data": dataclasses.replace(config.data, path=None, sources=sources),
        "evaluation": dataclasses.replace(config.evaluation, every=1, suites=("absent",)),
        "reward": dataclasses.replace(config.reward, function="no_such_reward"),
    }
    parts = ["steps=0 must be at least 1", "seed=-1 must be", "reward.function='no_such_reward' is"]
    parts.append(f"model.hf_path={none}: no config.json there")
    parts += [f"data.sources[{one}].path={tmp_path / one}.jsonl: no such file" for one in ("one", "two")]
    found = list(problems_of(demo(**wrong), []))
    assert [part in one for one, part in zip(found, [*parts, "suite absent"], strict=True)] == [True] * 7
    *_, row = recipe_rows("r.py", found)
    assert (row.state, row.fix) == ("problem", "bapo data prepare SOURCE --output data/suites/absent")


def test_a_check_that_raises_is_one_problem(
    demo: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that crashes at a wrong field is none; a message with its fix is one."""
    monkeypatch.setattr("bapo_megatron.trainer.preflight._check_engine", lambda *_: None)
    many = ConfigError("other settings:\nseed: 1, 2 now\nsay so")
    cases: list[tuple[Exception, dict[str, Any], str]] = [
        (ZeroDivisionError(), {"steps": 0}, "steps=0 must be at least 1"),
        (OSError("the disk is gone"), {}, "OSError in _execute_mock_call: the disk is gone"),
        (many, {}, "other settings: seed: 1, 2 now; say so"),
    ]
    for error, fields, problem in cases:
        monkeypatch.setattr("bapo_megatron.trainer.preflight.check_same_run", Mock(side_effect=error))
        assert list(problems_of(demo(**fields), [])) == [problem]


def test_weights_that_are_absent_hide_no_mistake_of_the_layout(
    demo: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = demo()
    (tmp_path / "config.json").write_bytes((config.model.hf_path / "config.json").read_bytes())
    model = dataclasses.replace(config.model, hf_path=tmp_path)
    parallel = dataclasses.replace(config.parallel, tensor=3)
    with pytest.raises(ConfigError, match="holds neither model.safetensors") as raised:
        check_weights(model, parallel)
    assert "parallel.tensor=3 does not divide" in str(raised.value).splitlines()[1]


def test_facts(demo: Callable[..., RunConfig], tmp_path: Path) -> None:
    rollout = demo().rollout
    named = dataclasses.replace(rollout, sglang=dataclasses.replace(rollout.sglang, urls=("http://a:1",)))
    replayed = dataclasses.replace(named, replay=tmp_path)
    found = [facts_of(demo(rollout=one)) for one in (rollout, named, replayed)]
    assert [one.starts_servers for one in found] == [True, False, False]
    assert [one.urls for one in found] == [[], ["http://a:1"], []]
    assert 0 < (found[0].disk_gb or 0) < 1


def test_a_server_without_a_key(server: Played) -> None:
    """A problem where others reach it, or where the recipe requires a key."""
    server.key = None
    [row] = bad(server_rows(facts(server.url)))
    assert (row.state, row.found.partition(":")[0]) == ("optional", "asks for no API key")
    assert set(server.keys) == {None}
    assert row.fix.startswith("start it with bapo rollout-server")
    [row] = bad(server_rows(facts(server.url, require_api_key=True)))
    assert row.state == "problem"
    assert all(map(is_loopback, ("http://127.0.1.1:1", "http://localhost:1", "http://[::1]:1")))
    assert not any(map(is_loopback, ("http://node1:1", "http://10.0.0.1:1", "http://0.0.0.0:1")))


def test_a_wrong_key_is_named(server: Played, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "o" * 43
    [row] = bad(server_rows(facts(server.url)))
    assert (row.state, row.found) == ("problem", f"asks for another API key than that in {key_file}")
    assert KEY not in repr(row)
    monkeypatch.delenv(VARIABLE)
    [row] = bad(server_rows(facts(server.url, directory="/nowhere")))
    assert row.found == "asks for an API key, and none is known here"
    assert "rollout.sglang.api_key_file" in row.fix
    key_file.chmod(0o644)
    [row] = bad(server_rows(facts(server.url, api_key_file=str(key_file))))
    assert (row.state, "has mode 0644" in row.found, KEY in repr(row)) == ("problem", True, False)
