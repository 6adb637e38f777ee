"""Folders of hybrids: text alone, and multi-modal ones, whose other tensors travel along unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.config import ParallelConfig
from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.config import for_servers, model_shape, read_model_shape
from bapo_megatron.hf.parameter_map import hf_tensors
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.policy.layout import layout_problems
from bapo_megatron.rollout.engines.backend import engine_backend
from bapo_megatron.rollout.engines.requests import limits_of
from bapo_megatron.rollout.engines.sglang.server_process import server_command
from checkpoints_tools import reshard, to_hf, to_megatron, verify
from checkpoints_tools.formats.locate import locate
from checkpoints_tools.formats.mp_rank import MpRank
from checkpoints_tools.formats.safetensors_folder import untrained_tensors
from checkpoints_tools.formats.torch_dist import TorchDist
from tests.support.models import EXPERT_HYBRID, HYBRID, HYBRIDS, SingleWriter, save_tiny_model, tiny_model

UNTRAINED = {
    "model.visual.patch_embed.proj.weight": (4, 3, 2, 2, 2),
    "model.visual.blocks.0.norm1.bias": (4,),
    "mtp.fc.weight": (32, 64),
    "mtp.layers.0.mlp.experts.gate_up_proj": (3, 8, 4),
}


def save_multimodal(folder: Path, tied: bool = False, family: str = HYBRID, **sizes: int) -> Path:
    """As the hub's: the text model under a prefix, in bfloat16 but for A_log and Gated DeltaNet's norm."""
    text = folder.parent / "text"
    tiny_model(family, **sizes).save_pretrained(text, save_original_format=False)  # experts fused
    tensors = {}
    for name, tensor in load_file(text / "model.safetensors").items():
        kept = name.endswith(("A_log", "linear_attn.norm.weight"))
        own = name.replace("model.", "model.language_model.", 1)
        tensors[own] = tensor if kept else tensor.bfloat16()
    if tied:
        del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(3)
    for name, shape in UNTRAINED.items():
        tensors[name] = torch.randn(shape, generator=generator).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**json.loads(for_servers((text / "config.json").read_bytes())), "dtype": "bfloat16"}
    config["tie_word_embeddings"] = tied
    outer = {
        "model_type": family.removesuffix("_text"),
        "architectures": [f"Qwen3_5{'Moe' * (family == EXPERT_HYBRID)}ForConditionalGeneration"],
        "dtype": "bfloat16",
    }
    whole = {**outer, "tie_word_embeddings": tied, "text_config": config, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json")}


@pytest.mark.parametrize(("family", "tied"), [(HYBRID, False), (HYBRID, True), (EXPERT_HYBRID, False)])
def test_a_multimodal_folder_comes_back_byte_for_byte(family: str, tied: bool, tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "hf", tied, family)
    HfReader(folder).check(read_model_shape(folder))
    to_megatron(folder, tmp_path / "megatron")
    assert verify(folder, tmp_path / "megatron").equal
    reshard(tmp_path / "megatron", tmp_path / "resharded", grid=3)
    for number, source in enumerate(("megatron", "resharded")):
        to_hf(tmp_path / source, tmp_path / f"back {number}")
        assert contents(tmp_path / f"back {number}") == contents(folder)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_text_folder_comes_back_byte_for_byte(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path / "hf")
    to_megatron(folder, tmp_path / "megatron", grid=5)
    stored = TorchDist(locate(tmp_path / "megatron").folder, read_model_shape(folder)).tensors.values()
    assert all(len({block.file for block in tensor.blocks}) == 1 for tensor in stored)  # one thread for each
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_experts_are_written_as_the_folder_of_the_model_has_them(
    fused: bool, shards: str, tmp_path: Path
) -> None:
    """transformers writes a tensor for each expert; the hub has those of a layer in two."""
    model, folder = tiny_model(EXPERT_HYBRID), tmp_path / "hf"
    model.save_pretrained(folder, save_original_format=not fused, max_shard_size=shards)
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", reference=folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" in path.name}
    assert (len(files) > 2) == (shards != "1GB")
    assert all((tmp_path / "back" / name).read_bytes() == own for name, own in files.items())
    assert any(name.endswith("experts.gate_up_proj") for name in load_file_names(folder)) == fused


def load_file_names(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


def test_rounding_leaves_float32_and_what_is_not_trained(tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "hf")
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bf16")
    assert contents(tmp_path / "back") == contents(folder)


def test_a_missing_part_that_is_not_trained_is_told(tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "hf")
    to_megatron(folder, tmp_path / "megatron")
    (tmp_path / "megatron/release/hf/untrained.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights, so that model\.visual\.\* and mtp\.\*"):
        to_hf(tmp_path / "megatron", tmp_path / "back")


def test_shards_of_any_name_hold_what_is_not_trained(tmp_path: Path) -> None:
    """The index says which they are."""
    folder = save_multimodal(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "weights_a.safetensors")
    index = dict.fromkeys(load_file(folder / "weights_a.safetensors"), "weights_a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert set(untrained_tensors(folder, read_model_shape(folder))) == set(UNTRAINED)


def test_a_legacy_folder_of_a_hybrid_is_not_read(tmp_path: Path) -> None:
    shape = read_model_shape(save_tiny_model(HYBRID, tmp_path / "hf"))
    with pytest.raises(CheckpointError, match="mp_rank folder of a model with layers of several kinds"):
        MpRank(tmp_path / "legacy", shape)


def config_of(tmp_path: Path, family: str = HYBRID) -> dict:
    return json.loads((save_tiny_model(family, tmp_path / "hf") / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (HYBRID, {"linear_num_value_heads": 6}, "heads=6 is not a multiple of linear_num_key_heads=4"),
        (HYBRID, {"layer_types": ["linear_attention"] * 8}, "and there are both"),
        (HYBRID, {"layer_types": ["full_attention"] * 3}, "each of the 8 layers"),
        (HYBRID, {"attn_output_gate": False}, "attn_output_gate=false is not supported"),
        (HYBRID, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=.* cannot be"),
        (HYBRID, {"attention_bias": True}, "attention_bias=True is not supported"),
        (EXPERT_HYBRID, {"norm_topk_prob": False}, "norm_topk_prob=false is not supported in this family"),
        (EXPERT_HYBRID, {"shared_expert_intermediate_size": 0}, "intermediate_size=0 cannot be"),
        (EXPERT_HYBRID, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 cannot be: there are 8 experts"),
        (EXPERT_HYBRID, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob is not"),
    ],
)
def test_what_a_hybrid_may_not_have_is_refused(
    family: str, changes: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_shape({**config_of(tmp_path, family), **changes}, "config.json")


def test_tp_divides_the_shared_expert(tmp_path: Path) -> None:
    config = {**config_of(tmp_path, EXPERT_HYBRID), "shared_expert_intermediate_size": 21}
    [problem] = layout_problems(ParallelConfig(tensor=2, sequence=True), model_shape(config, "config.json"))
    assert "parallel.tensor=2 does not divide the model's shared expert's width (21)" in problem


def test_contradicting_ties_are_refused(tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="tie_word_embeddings is not the same in text_config"):
        model_shape({**config, "tie_word_embeddings": True}, "config.json")


def test_a_null_outside_of_the_text_model_says_nothing(tmp_path: Path) -> None:
    config = json.loads((save_multimodal(tmp_path / "hf", tied=True) / "config.json").read_text())
    outside = {"tie_word_embeddings": None, "quantization_config": None}
    assert model_shape({**config, **outside}, "config.json").tied
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match="quantization_config .*text_config"):
        model_shape({**config, **outside}, "config.json")


def test_tp_times_cp_divides_the_key_heads(tmp_path: Path) -> None:
    shape = model_shape(config_of(tmp_path), "config.json")
    assert not list(layout_problems(ParallelConfig(tensor=2, context=2), shape))
    [problem] = layout_problems(ParallelConfig(tensor=2, context=4), shape)
    assert "2 x 4 = 8 does not divide the model's key heads of Gated DeltaNet (4)" in problem


INTERVAL = "full_attention_interval"


def text_of(config: dict) -> dict:
    return config.get("text_config", config)


@pytest.mark.parametrize("multimodal", [False, True])
def test_exports_and_hand_overs_tell_servers_which_layers_have_full_attention(
    multimodal: bool, tmp_path: Path
) -> None:
    """By the field that transformers leaves out. The other tensors are not handed over."""
    folder = save_multimodal(tmp_path / "hf") if multimodal else save_tiny_model(HYBRID, tmp_path / "hf")
    with_it = (folder / "config.json").read_bytes()
    config = json.loads(with_it)
    del text_of(config)[INTERVAL]
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(folder)
    to_megatron(folder, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "export")
    trained = {name: HfReader(folder).read(name) for name in hf_tensors(shape)}
    handed = SingleWriter(tmp_path / "weights", folder).write(trained.items(), 1)
    for made in (tmp_path / "export", handed):
        assert json.loads((made / "config.json").read_text()) == json.loads(with_it)
    assert set(HfReader(handed).names) == set(trained)
    assert all(torch.equal(HfReader(handed).read(name), tensor) for name, tensor in trained.items())


def test_a_tied_multimodal_model_is_handed_over_without_an_output_layer(tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "hf", tied=True)
    weights = {name: HfReader(folder).read(name) for name in hf_tensors(read_model_shape(folder))}
    twice = {**weights, "lm_head.weight": weights["model.language_model.embed_tokens.weight"]}
    handed = SingleWriter(tmp_path / "weights", folder).write(twice.items(), 1)
    assert set(HfReader(handed).names) == set(weights)


@pytest.mark.parametrize("multimodal", [False, True])
def test_servers_are_told_what_config_json_does_not_say(multimodal: bool, tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "hf") if multimodal else save_tiny_model(HYBRID, tmp_path / "hf")

    def told(*flags: str) -> list[dict]:
        line = server_command(Path("python"), folder, "127.0.0.1", 1, cuda=True, flags=flags)
        places = [place for place, one in enumerate(line) if one == "--json-model-override-args"]
        return [json.loads(line[place + 1]) for place in places]

    alone = {"language_model_only": True}
    assert told() == ([alone] if multimodal else [])
    config = json.loads((folder / "config.json").read_text())
    assert text_of(config).pop(INTERVAL) == 4
    text_of(config)["rope_parameters"]["partial_rotary_factor"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    missing = {INTERVAL: 4, "partial_rotary_factor": 0.5}
    assert told() == ([{**alone, "text_config": missing}] if multimodal else [missing])
    assert told("--json-model-override-args", "{}") == [{}]  # the recipe's own


def test_layers_that_a_server_would_take_for_others_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(HYBRID, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    for engine in ("sglang", "local"):
        engine_backend(engine).check_weights(folder)
    config["layer_types"][0] = "full_attention"
    with pytest.raises(ConfigError, match=f"layer_types and {INTERVAL}=4 contradict each other"):
        model_shape(config, "config.json")
    del config[INTERVAL]
    (folder / "config.json").write_text(json.dumps(config))
    engine_backend("local").check_weights(folder)
    with pytest.raises(ConfigError, match="cannot be served by SGLang: layer_types=.* in every n-th layer"):
        engine_backend("sglang").check_weights(folder)
    assert for_servers(json.dumps(config).encode()) == json.dumps(config).encode()


def test_limits_of_a_multimodal_model_are_its_text_models(tmp_path: Path) -> None:
    assert limits_of(save_multimodal(tmp_path / "hf")) == limits_of(tmp_path / "text")
