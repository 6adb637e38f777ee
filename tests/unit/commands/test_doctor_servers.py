"""``bapo doctor``: rows of rollout servers (a fake HTTP server) and of recipes."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.doctor import servers
from bapo_megatron.commands.doctor.packages import SGLANG, pins
from bapo_megatron.commands.doctor.recipe import RecipeFacts, facts_of, problems_of, recipe_rows
from bapo_megatron.commands.doctor.rows import DoctorRow
from bapo_megatron.commands.doctor.servers import get, longest_sequence, server_rows
from bapo_megatron.config import RunConfig, SourceConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang_launch.api_key import VARIABLE
from bapo_megatron.runtime.http import is_loopback
from bapo_megatron.trainer.preflight import check_weights

ROOT = Path(__file__).parents[3]
KEY = "k" * 43
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 8,
}


class Played:
    """Answers like SGLang 0.5.23, or with given answers: path to status and body."""

    def __init__(self, model: Path) -> None:
        self.key: str | None = KEY
        self.sent: set[str | None] = set()
        """The authorizations that came."""
        about = {"model_path": str(model), "model_type": "qwen2", "weight_version": "0"}
        server = {
            "version": pins(SGLANG)["sglang"],
            "context_length": 264,
            "max_req_input_len": 258,
            "dtype": "float32",
            "disable_radix_cache": False,
            "disable_overlap_schedule": False,
        }
        self.answers: dict[str, tuple[int, Any]] = {
            "/ready": (200, ""),
            "/model_info": (200, about),
            "/server_info": (200, server),
        }
        self.about, self.server = about, server
        self.delay_s = 0.0
        played = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(played.delay_s)
                status, body = played.answers.get(self.path, (404, {"detail": "Not Found"}))
                given = self.headers.get("Authorization")
                played.sent.add(given)
                if played.key and self.path.endswith("_info") and given != f"Bearer {played.key}":
                    status, body = 401, {"error": "Unauthorized"}
                sent = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_args: Any) -> None:
                """Into no test's output."""

        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._httpd.server_port}"
        threading.Thread(target=self._httpd.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key that the environment names."""
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(file))
    return file


@pytest.fixture
def server(model: Path) -> Iterator[Played]:
    played = Played(model)
    yield played
    played.stop()


def facts(*urls: str, **more: Any) -> RecipeFacts:
    usual = RecipeFacts(
        directory="runs/demo",
        urls=list(urls),
        on_update="retract",
        longest_sequence=256,
        dtype="float32",
        model=SHAPE,
    )
    return dataclasses.replace(usual, **more)


def bad(rows: Iterator[DoctorRow]) -> list[DoctorRow]:
    return [row for row in rows if row.state != "ok"]


def test_a_server_that_fits(server: Played, model: Path, key_file: Path) -> None:
    rows = list(server_rows(facts(server.url + "/")))
    assert {(row.section, row.name, row.state) for row in rows} == {("servers", server.url, "ok")}
    assert [row.found for row in rows] == [
        "ready",
        f"asks for the API key in {key_file}",
        "weight version 0",
        f"model {model}, 264 token ids",
        "context for sequences of 256 tokens",
        f"SGLang {pins(SGLANG)['sglang']}",
    ]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str]] = {
    # name: path, what it says instead, what the recipe says instead, state, found
    "version": ("/model_info", {"weight_version": "default"}, {}, "problem", "weight version 'default'"),
    "no version": ("/model_info", {"weight_version": None}, {}, "problem", "no weight version"),
    "type": ("/model_info", {"model_type": "llama"}, {}, "problem", "model_type llama, the recipe's qwen2"),
    "shape": (
        "/model_info",
        {},
        {"model": SHAPE | {"vocab_size": 9}},
        "problem",
        "vocab_size 264, the recipe's 9",
    ),
    "experts": (
        "/model_info",
        {},
        {"model": SHAPE | {"num_experts_per_tok": 4}},
        "problem",
        "num_experts_per_tok 8, the recipe's 4",
    ),
    "context": ("/server_info", {}, {"longest_sequence": 257}, "problem", "sequences of 256 tokens"),
    "dtype": ("/server_info", {"dtype": "bfloat16"}, {}, "optional", "dtype bfloat16"),
    "head": (
        "/server_info",
        {"dtype": "bfloat16", "enable_fp32_lm_head": False},
        {"dtype": "bfloat16"},
        "optional",
        "no --enable-fp32-lm-head",
    ),
    "sglang": ("/server_info", {"version": "0.4.1"}, {}, "optional", "SGLang 0.4.1"),
    "graphs": (
        "/server_info",
        {"cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "breakable"}}},
        {},
        "optional",
        "breakable prefill graphs",
    ),
    "storage": (
        "/server_info",
        {"hicache_storage_backend": "file"},
        {},
        "problem",
        "--hicache-storage-backend",
    ),
    "routes": (
        "/server_info",
        {"enable_return_routed_experts": False},
        {"needs_routes": True},
        "problem",
        "no --enable-return-routed-experts",
    ),
    "kernel": (
        "/server_info",
        {"enable_return_routed_experts": True, "moe_runner_backend": "flashinfer_trtllm"},
        {"needs_routes": True},
        "problem",
        "a kernel that chooses experts itself, flashinfer_trtllm",
    ),
    "cache": (
        "/server_info",
        {"disable_overlap_schedule": True},
        {"on_update": "in_place"},
        "problem",
        "no --disable-radix-cache",
    ),
    "draft": (
        "/server_info",
        {"speculative_algorithm": "EAGLE"},
        {"sync": "broadcast"},
        "problem",
        "has --speculative-algorithm EAGLE",
    ),
    "overlap": (
        "/server_info",
        {"disable_radix_cache": True},
        {"on_update": "in_place"},
        "problem",
        "no --disable-overlap-schedule",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_does_not_fit(server: Played, case: str) -> None:
    path, says, recipe, state, found = CASES[case]
    server.answers[path] = (200, {**server.answers[path][1], **says})
    (row,) = bad(server_rows(facts(server.url, **recipe)))
    assert row.state == state
    assert found in row.found
    assert row.needed
    assert row.fix


def test_a_server_that_pauses(server: Played) -> None:
    server.answers["/ready"] = (503, "")
    (row,) = bad(server_rows(facts(server.url)))
    assert (row.state, row.found) == ("problem", "not ready: status 503")
    assert f"{server.url}/continue_generation" in row.fix


def test_a_router_is_distinguished_from_a_server(server: Played) -> None:
    server.answers = {"/workers": (200, {"workers": [{"url": "http://a:1"}, {"url": "http://b:2"}]})}
    (row,) = server_rows(facts(server.url))
    assert row.found == "a router, which takes no weights"
    assert row.fix.endswith("--rollout.sglang.urls http://a:1 http://b:2")


def test_another_program(server: Played) -> None:
    server.answers = {}
    (row,) = server_rows(facts(server.url))
    assert (row.state, row.found) == ("problem", "answers, and has no /ready")


def test_malformed_answers_are_no_traceback(server: Played) -> None:
    server.answers |= {"/model_info": (200, ["hello"]), "/server_info": (500, "<html>")}
    rows = list(server_rows(facts(server.url)))
    assert [row.state for row in rows] == ["ok", "ok", "problem", "ok"]  # no weight version


def test_servers_that_are_gone_or_hang(server: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = server.url
    gone = Played(Path())
    gone.stop()
    monkeypatch.setattr(get, "__defaults__", (4.0,))  # the first answers at once, also on a busy machine
    server.delay_s = 30
    began = time.monotonic()
    rows = list(server_rows(facts(gone.url, hanging)))
    assert time.monotonic() - began < 20  # it did not wait for the second to answer
    assert [row.name for row in rows] == [gone.url, hanging]
    assert "Connection refused" in rows[0].found
    assert rows[1].found in ("no answer: timed out", "no answer: no answer within 4 s")


def test_proxies_are_bypassed(server: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not use them either."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert get(f"{server.url}/ready").status == 200


def test_an_answer_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes within the time-out of a read, but the answer never ends."""
    monkeypatch.setattr(servers, "ask", lambda *_, **__: time.sleep(30))
    assert get("http://127.0.0.1:1", 0.1).reason == "no answer within 0.1 s"


def test_servers_of_several_versions(server: Played, model: Path) -> None:
    other = Played(model)
    other.answers["/model_info"] = (200, {**other.about, "weight_version": "7"})
    (row,) = bad(server_rows(facts(server.url, other.url)))
    assert (row.state, row.found) == ("problem", f"{server.url}: 0, {other.url}: 7")
    other.stop()


def test_no_servers_no_rows() -> None:
    assert list(server_rows(facts())) == []


def test_the_longest_sequence() -> None:
    """SGLang 0.5.23 with a context of 4096 says 4090 for the prompt, and reserves less than 8 tokens."""
    assert longest_sequence({"context_length": None, "max_req_input_len": 4090}) == 4088
    assert longest_sequence({"context_length": 264, "max_req_input_len": 258}) == 256
    assert longest_sequence({}) is None


# --- recipes -------------------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., RunConfig]:
    config = load_recipe(ROOT / "recipes/demo_sglang_cpu.py", RunConfig)

    def changed(**fields: Any) -> RunConfig:
        return dataclasses.replace(config, run_dir=tmp_path / "run", **fields)

    return changed


def test_every_problem_is_reported_once(demo: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = demo()
    data = dataclasses.replace(config.data, path=tmp_path / "none.jsonl")
    logging = dataclasses.replace(config.logging, wandb_project="x")
    parallel = dataclasses.replace(config.parallel, pipeline=5)
    sglang = dataclasses.replace(config.rollout.sglang, python=tmp_path / "none")
    rollout = dataclasses.replace(config.rollout, sglang=sglang)
    found = list(problems_of(demo(data=data, logging=logging, parallel=parallel, rollout=rollout)))
    assert len(found) == len(set(found)) == 4
    assert "wandb is not installed" in found[0]
    assert "model chunks of the model's 4 layers" in found[1]
    assert "no interpreter at" in found[2]
    assert found[3].startswith(f"data.path={tmp_path / 'none.jsonl'}: no such file; give")


def test_mistakes_of_every_kind_are_told_at_once(demo: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Wrong fields, in their own words alone, an absent model, and files of two sources and a suite."""
    config, model = demo(), dataclasses.replace(demo().model, hf_path=tmp_path / "none")
    sources = tuple(SourceConfig(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    evaluation = dataclasses.replace(config.evaluation, every=1, suites=("absent",))
    reward = dataclasses.replace(config.reward, function="no_such_reward")
    data = dataclasses.replace(config.data, path=None, sources=sources)
    changes = {"model": model, "data": data, "evaluation": evaluation, "reward": reward}
    found = list(problems_of(demo(steps=0, seed=-1, **changes)))
    beginnings = (
        *("steps=0 must be at least 1", "seed=-1 must be at least 0", "reward.function='no_such_reward' is"),
        f"model.hf_path={tmp_path / 'none'}: no config.json there",
        *(f"data.sources[{name}].path={tmp_path / name}.jsonl: no such file" for name in ("one", "two")),
        "suite absent: there is neither",
    )
    assert [one[: len(text)] for one, text in zip(found, beginnings, strict=True)] == list(beginnings)


def test_the_fix_of_a_missing_suite_is_the_command_that_makes_it(demo: Callable[..., RunConfig]) -> None:
    evaluation = dataclasses.replace(demo().evaluation, every=1, suites=("absent",))
    [row] = recipe_rows("r.py", list(problems_of(demo(evaluation=evaluation))))
    assert row.fix == "bapo data prepare SOURCE --output data/suites/absent"


def test_a_check_that_crashes_on_a_wrong_field_is_not_another_problem(
    demo: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_config: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("bapo_megatron.trainer.preflight.check_same_run", broken)
    monkeypatch.setattr("bapo_megatron.trainer.preflight._check_engine", lambda _config: None)
    assert list(problems_of(demo(steps=0))) == ["steps=0 must be at least 1"]


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


def test_a_message_with_its_fix_is_one_problem(
    demo: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(_config: object) -> None:
        raise ConfigError(
            "the run r was started with other settings:\nseed: 1 in the run, 2 now\ngive it back"
        )

    monkeypatch.setattr("bapo_megatron.trainer.preflight.check_same_run", other)
    monkeypatch.setattr("bapo_megatron.trainer.preflight._check_engine", lambda _config: None)
    one = "the run r was started with other settings: seed: 1 in the run, 2 now; give it back"
    assert list(problems_of(demo())) == [one]


def test_an_address_that_the_recipe_s_check_refuses_is_not_asked() -> None:
    assert list(server_rows(facts("localhost:3000"))) == []


def test_a_check_that_raises_is_reported(
    demo: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_config: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("bapo_megatron.trainer.preflight.check_same_run", broken)
    monkeypatch.setattr("bapo_megatron.trainer.preflight._check_engine", lambda _config: None)
    assert list(problems_of(demo())) == ["OSError in broken: the disk is gone"]


def test_facts(demo: Callable[..., RunConfig], tmp_path: Path) -> None:
    found = facts_of(demo())
    assert found.starts_servers
    assert found.urls == []
    assert found.longest_sequence == demo().longest_sequence
    assert found.model is not None
    assert found.model["vocab_size"] == 264
    config = demo()
    sglang = dataclasses.replace(config.rollout.sglang, urls=("http://a:1",))
    named = facts_of(demo(rollout=dataclasses.replace(config.rollout, sglang=sglang)))
    assert not named.starts_servers
    assert named.urls == ["http://a:1"]
    replayed = dataclasses.replace(config.rollout, sglang=sglang, replay=tmp_path)
    assert facts_of(demo(rollout=replayed)).urls == []


def test_the_disk_that_a_run_needs(demo: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion parameters in bfloat16, two checkpoints kept, SGLang: 14 x 3 + 2 x 3 bytes for each.

    And the rollouts of 10 steps: 16,384 responses of a quarter of 4,000 tokens, 12 bytes for each token.
    """
    monkeypatch.setattr("bapo_megatron.planning.sizes.total_parameters", lambda _shape: 10**9)
    config = demo()
    sampled = dataclasses.replace(
        config.rollout, prompts_per_step=1024, group_size=16, max_response_tokens=4000
    )
    rollouts = 10 * 16_384 * 1000 * 12 / 1e9
    large = demo(
        rollout=sampled,
        model=dataclasses.replace(config.model, dtype="bfloat16"),
        checkpoint=dataclasses.replace(config.checkpoint, keep_last=2),
        evaluation=dataclasses.replace(config.evaluation, every=0),
    )
    assert facts_of(large).disk_gb == 48.0 + rollouts
    often = dataclasses.replace(large.checkpoint, every=1)
    few = dataclasses.replace(large, rollout=dataclasses.replace(sampled, keep_steps=2), checkpoint=often)
    assert facts_of(few).disk_gb == pytest.approx(48.0 + rollouts / 5)
    replayed = dataclasses.replace(large, rollout=dataclasses.replace(sampled, replay=Path("other")))
    assert facts_of(replayed).disk_gb == 48.0
    kept = dataclasses.replace(large.checkpoint, keep_last=0, every=3)  # 10 steps: checkpoints 3, 6, 9, 10
    assert facts_of(dataclasses.replace(large, checkpoint=kept)).disk_gb == 14.0 * 5 + 6 + rollouts
    exporting = dataclasses.replace(large.checkpoint, every=2, export_every=4)  # after steps 4 and 8
    needed = 14.0 * 3 + 6 + 2 * 2 + rollouts
    assert facts_of(dataclasses.replace(large, checkpoint=exporting)).disk_gb == needed


def test_rows_of_a_recipe() -> None:
    assert [row.state for row in recipe_rows("a.py", [])] == ["ok"]
    rows = list(recipe_rows("a.py", ["one", "two"]))
    assert [(row.state, row.found) for row in rows] == [("problem", "one"), ("problem", "two")]


def test_a_server_without_a_key(server: Played) -> None:
    """A problem where others reach it, or where the recipe requires a key. It is not sent ours."""
    server.key = None
    server.sent.clear()
    [row] = bad(server_rows(facts(server.url)))
    assert (row.state, row.found.partition(":")[0]) == ("optional", "asks for no API key")
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
