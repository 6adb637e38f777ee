"""Routes from an engine's answer to the file of a step: decoded, checked, journaled, stored, deleted."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import ModelConfig
from bapo_megatron.data.routes import read_routes, route_problem, write_routes
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.sglang.wire import (
    BadReply,
    decoded_routes,
    generate_payload,
    generation_of,
)
from bapo_megatron.rollout.sampler.response import without_routes
from bapo_megatron.rollout.sampler.step_batches import (
    StepFiles,
    read_step,
    routes_path,
    step_path,
    write_step,
)
from bapo_megatron.runtime.storage import FailingDiskError
from bapo_megatron.types import (
    GenerateRequest,
    Group,
    ResponseTokens,
    Rollout,
    RouteShape,
    SamplingParams,
    StepBatch,
    StoredRoutes,
)
from tests.support.models import EXPERTS as FAMILY
from tests.support.models import save_tiny_model
from tests.support.routed_engine import LAYERS, RoutedEngine, known_rows, routes_of
from tests.support.sampling import ScriptedEngine, World, until
from tests.unit.rollout.test_step_batches import batch, rollout

SHAPE = RouteShape(layers=2, per_token=2, experts=8)
REQUEST = GenerateRequest("r", np.array([1, 2, 4]), SamplingParams(1.0, 3, ()), routes=SHAPE)


# --- what a route is ---


@pytest.mark.parametrize(
    ("experts", "per_token", "dtype"),
    [(8, 2, "u1"), (255, 1, "u1"), (256, 8, "u1"), (256, 1, "u2"), (257, 8, "u2"), (512, 10, "u2")],
)
def test_a_byte_holds_an_expert_and_the_mark_of_an_unknown_route(
    experts: int, per_token: int, dtype: str
) -> None:
    shape = RouteShape(3, per_token, experts)
    assert shape.dtype == np.dtype(dtype)
    last = np.full((1, 3, per_token), experts - 1, shape.dtype)
    last[..., : per_token - 1] = np.arange(per_token - 1)
    assert known_rows(last).tolist() == [True]


def test_every_row_of_a_long_answer_is_checked() -> None:
    """The check takes blocks of rows: the last row of the second block, and a pair that is not adjacent."""
    shape = RouteShape(4, 8, 128)
    routes = np.tile(np.arange(8, dtype=np.uint8), (40_000, 4, 1))
    assert route_problem(routes, shape) is None
    routes[32_767, 3] = [7, 1, 2, 3, 4, 5, 6, 7]
    assert str(route_problem(routes, shape)).startswith("token 32767 went to the experts [7, 1, 2")


# --- SGLang's answers ---


def reply(routes: Any, tokens: int = 3, version: str = "0", **about: Any) -> bytes:
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": version,
        "output_token_logprobs": [[-1.0, 5 + n, None] for n in range(tokens)],
        **about,
    }
    if routes is not None:
        meta["routed_experts"] = base64.b64encode(np.array(routes, np.int32).tobytes()).decode()
    return json.dumps({"output_ids": [5, 6, 7][:tokens], "meta_info": meta}).encode()


THREE = [[[0, 1], [7, 6]], [[5, 4], [1, 0]], [[3, 2], [2, 3]]]


def test_a_request_asks_from_the_position_that_predicts_its_first_token() -> None:
    sent = json.loads(generate_payload(REQUEST, "x"))
    assert (sent["return_routed_experts"], sent["routed_experts_start_len"]) == (True, 2)
    plain = json.loads(generate_payload(replace(REQUEST, routes=None), "x"))
    assert not {"return_routed_experts", "routed_experts_start_len"} & set(plain)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_answers_routes_are_packed(indent: int | None) -> None:
    body = json.dumps(json.loads(reply(THREE)), indent=indent).encode()
    found = generation_of(REQUEST, body).routes_R
    assert found is not None
    assert (found.tolist(), found.dtype) == (THREE, np.uint8)
    assert generation_of(REQUEST, reply(None)).routes_R is None
    assert generation_of(replace(REQUEST, routes=None), reply(THREE)).routes_R is None


def test_an_abort_out_of_the_queue_keeps_its_tokens_with_unknown_routes() -> None:
    """A request that waits with tokens, because the cache was full, is aborted without its routes."""
    body = reply(None, finish_reason={"type": "abort"})
    found = generation_of(REQUEST, body)
    assert found.token_ids_R.tolist() == [5, 6, 7]
    assert found.routes_R is not None
    assert found.routes_R.shape == (3, 2, 2)
    assert found.routes_R.dtype.name == "uint8"
    assert not known_rows(found.routes_R).any()
    assert generation_of(replace(REQUEST, routes=None), body).routes_R is None
    assert generation_of(REQUEST, reply(None, 0, finish_reason={"type": "abort"})).routes_R is None


def test_after_a_retraction_older_weights_routes_are_unknown() -> None:
    """A server whose cache is full computes a prefix again, also where requests keep it in place."""
    spans = [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]

    def known(**about: Any) -> list[bool]:
        found = generation_of(REQUEST, reply(THREE, version="1", **about)).routes_R
        assert found is not None
        return [bool(row) for row in known_rows(found)]

    assert known(weight_versions=spans, num_retractions=1) == [False, False, True]
    assert known(weight_versions=spans, num_retractions=0) == [True] * 3
    assert known(weight_versions=spans) == [True] * 3
    assert known(num_retractions=2) == [True] * 3


PAIR = [[3, 3], [2, 3]]
BAD: dict[str, tuple[Any, str]] = {
    "a token less": (THREE[:2], "8 experts are not routes of 3 tokens through 2 layers with 2 experts each"),
    "out of range": (
        [THREE[0], [[5, 4], [1, 8]], THREE[2]],
        r"token 1 went to the experts \[1, 8\] of layer 1; a route has 2",
    ),
    "negative": ([[[0, 1], [-1, 6]], *THREE[1:]], "expert -1; there are 0 to 7"),
    "an expert twice": ([THREE[0], THREE[1], PAIR], r"token 2 went to the experts \[3, 3\] of layer 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_routes_are_refused(name: str) -> None:
    routes, says = BAD[name]
    with pytest.raises(BadReply, match=f"request 'r': its routes are wrong: {says}"):
        generation_of(REQUEST, reply(routes))


def test_routes_of_zeros_are_none() -> None:
    """What a server returns whose kernel chooses experts itself: the run stops, and names the flag."""
    zeros = [[[0, 0], [0, 0]]] * 3
    found = generation_of(REQUEST, reply(zeros))
    assert found.routes_R is None
    told = without_routes(found, REQUEST, "http://a:1")
    assert "http://a:1: answers without routes" in str(told)
    assert "--moe-runner-backend triton" in str(told)
    with pytest.raises(BadReply, match=r"token 0 went to the experts \[0, 0\] of layer 0"):
        generation_of(REQUEST, reply([[[0, 0], [0, 1]], *zeros[1:]]))
    for bad in (
        reply([]),
        reply(zeros, finish_reason={"type": "abort"}),
    ):
        with pytest.raises(BadReply, match="its routes are wrong"):
            generation_of(REQUEST, bad)


@pytest.mark.parametrize("experts", [8, 128, 256, 300])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 3000])
def test_routes_are_decoded_as_the_standard_library_does(experts: int, tokens: int) -> None:
    """Every number of a byte, with and without padding, at an address that no number's is."""
    shape = RouteShape(5, 4, experts)
    generator = np.random.default_rng(tokens)
    wide = np.argsort(generator.random((tokens, 5, experts)), -1)[..., :4].astype(np.int32)
    text = memoryview(b"odd" + base64.b64encode(wide.tobytes()))[3:]
    assert base64.b64decode(text, validate=True) == wide.tobytes()
    found = decoded_routes(text, tokens, shape)
    assert found.dtype == shape.dtype
    assert (found == wide).all()
    with pytest.raises(ValueError, match="Non-base64 digit"):
        decoded_routes(memoryview(b"*" + bytes(text[1:])), tokens, shape)


def test_no_number_is_taken_that_does_not_fit() -> None:
    """One number of an answer, with each bit of the upper bytes set."""
    wide = np.arange(24, dtype=np.int32)
    for place in (0, 1, 2, 21, 22, 23):
        for bit in range(8, 32):
            wrong = wide.view(np.uint32).copy()
            wrong[place] |= np.uint32(1 << bit)
            text = memoryview(base64.b64encode(wrong.tobytes()))
            with pytest.raises(ValueError, match="expert .*; there are 0 to 255"):
                decoded_routes(text, 1, RouteShape(1, 24, 256))


def test_routes_without_an_end_are_refused() -> None:
    with pytest.raises(BadReply, match="no generation"):
        generation_of(REQUEST, b'{"meta_info": {"routed_experts": "AAAA')


# --- step files ---


def with_routes(one: Rollout, prompt: int, sample: int) -> Rollout:
    return replace(one, routes_R=routes_of(prompt, sample, range(len(one.token_ids_R))))


def routed_batch() -> StepBatch:
    """The batch of ``test_step_batches``, whose last response has no routes."""
    groups = [
        Group(group.prompt, tuple(with_routes(one, number, n) for n, one in enumerate(group.rollouts)))
        for number, group in enumerate(batch().groups)
    ]
    last = groups[-1]
    groups[-1] = Group(last.prompt, (last.rollouts[0], replace(last.rollouts[1], routes_R=None)))
    return StepBatch(tuple(groups), {})


def stored(found: StepBatch) -> list[StoredRoutes]:
    return [one.stored_routes for group in found.groups for one in group.rollouts if one.stored_routes]


def test_a_steps_routes_are_in_a_file_beside_it(tmp_path: Path) -> None:
    with np.load(write_step(tmp_path, 3, routed_batch())) as arrays:
        assert "routes" not in arrays.files
    assert np.load(routes_path(tmp_path, 3)).shape == (10 + 0 + 3 + 8, LAYERS, 2)
    found = read_step(tmp_path, 3)
    assert all(one.routes_R is None for group in found.groups for one in group.rollouts)
    assert [where.first for where in stored(found)] == [0, 10, 10, 13]
    read = [read_routes(where, 0) for where in stored(found)]
    assert read[0].tolist() == routes_of(0, 0, range(10)).tolist()
    assert read[2].tolist() == routes_of(1, 0, range(3)).tolist()
    assert [known_rows(one).all() for one in read] == [True, True, True, False]
    assert not known_rows(read[3]).any()
    again = write_step(tmp_path / "again", 3, routed_batch())
    assert again.read_bytes() == step_path(tmp_path, 3).read_bytes()


def test_the_routes_are_on_disk_before_the_step_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bapo_megatron.rollout.sampler import step_batches

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_batches, "write_atomically", fail)  # that of the step file alone
    with pytest.raises(Exception, match="No space left"):
        write_step(tmp_path, 3, routed_batch())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003.routes.npy"]


def test_damaged_and_missing_routes_are_seen(tmp_path: Path) -> None:
    """Every response has a checksum: a flipped bit, and the rows of another response."""
    write_step(tmp_path, 3, routed_batch())
    where, path = stored(read_step(tmp_path, 3)), routes_path(tmp_path, 3)
    with pytest.raises(FailingDiskError, match="routes.npy: rows 1 to 11 are not the routes"):
        read_routes(replace(where[0], first=1), 0)
    with pytest.raises(FailingDiskError, match="rows 10 to 13 are not"):
        read_routes(replace(where[2], dtype="<u2"), 0)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    read_routes(where[0], 0)
    with pytest.raises(FailingDiskError, match="the file is damaged; start the run again"):
        for one in where:
            read_routes(one, 0)
    path.write_bytes(content[:-1])
    with pytest.raises(FailingDiskError, match="cannot be read after 0.1 s"):
        read_routes(where[0], 0.1)
    path.unlink()
    with pytest.raises(FailingDiskError, match=r"every rank must see the run directory"):
        read_routes(where[0], 0.1)


async def test_a_file_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    routes = routes_of(0, 0, range(3))
    [crc] = write_routes(tmp_path / "late.npy", [routes])
    where = StoredRoutes(tmp_path / "shown.npy", 0, 3, LAYERS, 2, "|u1", crc)
    reading = asyncio.create_task(asyncio.to_thread(read_routes, where, 60))
    await asyncio.sleep(0.1)
    assert not reading.done()
    (tmp_path / "late.npy").rename(tmp_path / "shown.npy")
    assert (await reading).tolist() == routes.tolist()


def test_a_step_without_its_routes_is_put_aside_and_deleted_with_its_file(tmp_path: Path) -> None:
    reported: list[str] = []
    files = StepFiles(tmp_path, lambda kind, **_: reported.append(kind))
    for step in (1, 2, 3):
        write_step(tmp_path, step, routed_batch())
    assert files.is_readable(2)
    path = routes_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-3])
    assert not files.is_readable(2)
    assert reported == ["step_lost"]
    lost = {f"step_00000{n}.{end}" for n in (2, 3) for end in ("lost", "routes.lost")}
    assert {one.name for one in tmp_path.iterdir()} == {"step_000001.npz", "step_000001.routes.npy", *lost}
    files.delete(2)
    assert {one.name for one in tmp_path.iterdir()} == {"step_000003.lost", "step_000003.routes.lost"}


def test_steps_without_routes_have_no_such_file(tmp_path: Path) -> None:
    write_step(tmp_path, 1, StepBatch((), {}))
    write_step(tmp_path, 2, batch())
    assert {one.name for one in tmp_path.iterdir()} == {"step_000001.npz", "step_000002.npz"}
    assert stored(read_step(tmp_path, 2)) == []


def test_parts_of_a_response_without_routes_are_unknown() -> None:
    first, second = rollout(3, 0.0), rollout(2, 0.0)
    joined = ResponseTokens.joined([first, with_routes(second, 0, 0)]).routes_R
    assert joined is not None
    assert joined.dtype == np.uint8
    assert known_rows(joined).tolist() == [False] * 3 + [True] * 2
    wide = replace(second, routes_R=routes_of(0, 0, range(2)).astype(np.uint16))
    with pytest.raises(ValueError, match="routes_R: the values of some tokens have another shape or type"):
        ResponseTokens.joined([with_routes(first, 0, 0), wide])


# --- the sampler ---

SETTINGS: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 2,
    "max_response_tokens": 12,
    "segment_tokens": 2,
    "drop_uniform_groups": False,
    "route_replay": "replay",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(FAMILY, tmp_path_factory.mktemp("model"))


def world(tmp_path: Path, model: Path, engine: ScriptedEngine) -> World:
    made = World(tmp_path, [engine], **SETTINGS)
    made.config = replace(made.config, model=ModelConfig(model))
    return made


async def test_routes_of_every_segment_survive_kills(tmp_path: Path, folder: Path) -> None:
    """Killed with half of each response in the log: the step's file has the routes of all places."""
    engine = RoutedEngine(lambda prompt, sample: "yabcdef"[: 5 + sample])
    engine.holds = lambda request: request.prefix_tokens >= 4
    engine.gate.clear()
    made = world(tmp_path, folder, engine)
    async with made.sampling(rounds=False):
        await until(lambda: made.sampler.state()["tokens"].get("sampled") == 2 * 2 * 4)
        made.kill()
    engine.gate.set()
    engine.asked.clear()
    async with made.sampling():
        found = await made.batch(1)
    assert {request.prefix_tokens for request in engine.asked} == {4, 6}
    for group in found.groups:
        for sample, one in enumerate(group.rollouts):
            assert one.stored_routes is not None
            wanted = routes_of(int(group.prompt.token_ids_P[0]), sample, range(len(one.token_ids_R)))
            assert read_routes(one.stored_routes, 0).tolist() == wanted.tolist()


async def test_an_engine_without_routes_stops_the_first_step(tmp_path: Path, folder: Path) -> None:
    made = world(tmp_path, folder, ScriptedEngine(lambda *_: "yab"))
    async with made.sampling():
        with pytest.raises(ConfigError, match="scripted: answers without routes, which rollout"):
            await made.batch(1)
