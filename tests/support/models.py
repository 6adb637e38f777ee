"""Tiny random models of every family, as Hugging Face folders, and random samples for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.config import for_servers
from bapo_megatron.rollout.weight_sync.disk import WeightStaging

FAMILIES = ["qwen2", "qwen3", "llama"]
EXPERTS = "qwen3_moe"
"""A family with experts, whose layouts have tests of their own."""
HYBRIDS = ["qwen3_5_text", "qwen3_5_moe_text"]
"""Families with Gated DeltaNet in most layers, whose layouts have tests of their own."""
HYBRID, EXPERT_HYBRID = HYBRIDS
FORMS = [*FAMILIES, "qwen3_tied"]
"""The families, and Qwen3 as its models up to 4B are: with one matrix as embedding and output layer."""
VOCAB = 128
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    # Not transformers' and megatron's default of 10,000, which hides a base that is lost on its way.
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_HYBRID = {
    "num_hidden_layers": 8,
    "head_dim": 16,
    # With a small one a model of random weights is ill-conditioned: at a document's first token the norm of
    # the output has the sign of q k, however near zero that is.
    "rms_norm_eps": 0.3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 50000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}

_ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_EXPERTS = {**_ROUTED, "num_hidden_layers": 4, "shared_expert_intermediate_size": 20}


_QWEN3 = {"head_dim": 16}
_CLASSES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _QWEN3),
    "qwen3_tied": ("Qwen3Config", "Qwen3ForCausalLM", {**_QWEN3, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_QWEN3, **_ROUTED, "norm_topk_prob": True}),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HYBRID),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_HYBRID, **_SHARED_EXPERTS}),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": _LLAMA_ROPE},
    ),
}
"""Of each family: transformers' classes, and what its configuration has beside ``_COMMON``."""


def tiny_model(family: str, seed: int = 0, **shape: int) -> torch.nn.Module:
    """A float32 transformers model; weights, biases and norms all random, so that a lost one shows.

    ``shape`` overrides fields of its configuration.
    """
    import transformers

    config_class, model_class, extra = _CLASSES[family]
    config = getattr(transformers, config_class)(**{**_COMMON, **extra, **shape})
    model = getattr(transformers, model_class)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            mean = 0.0 if name.endswith("A_log") or (family in HYBRIDS and _is_zero_centered(name)) else 1.0
            # A hybrid's convolution is of a few taps: its outputs must not vanish beside rms_norm_eps.
            deviation = 1.0 if name.endswith("conv1d.weight") else 0.15
            parameter.copy_(mean + 0.2 * noise if parameter.dim() == 1 else deviation * noise)
    return model


def _is_zero_centered(name: str) -> bool:
    """Whether a norm of a hybrid multiplies by 1 + w: all but Gated DeltaNet's own."""
    return name.endswith("norm.weight") and "linear_attn." not in name


def save_tiny_model(family: str, folder: Path, seed: int = 0, **shape: int) -> Path:
    """The model as a Hugging Face folder without a tokenizer, and with all that the hub's config.json has."""
    tiny_model(family, seed, **shape).save_pretrained(folder)
    config = folder / "config.json"
    config.write_bytes(for_servers(config.read_bytes()))
    return folder


def save_nearly_tied_experts(folder: Path) -> Path:
    """A mixture of experts as a folder, whose routers cannot tell experts apart: rounding decides."""
    model = tiny_model(EXPERTS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[arg-type, union-attr]
            gate_EH = layer.mlp.gate.weight
            noise_EH = torch.randn(gate_EH.shape, generator=generator)
            gate_EH.copy_(gate_EH[:1] * (1 + 1e-7 * noise_EH))
    model.save_pretrained(folder)
    return folder


class SingleWriter(WeightStaging):
    """Weight folders of a run, written by one process."""

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> Path:
        """Write all weights and return their folder."""
        self.prepare(version)
        self.publish(version, self.write_share(weights, version, 0, 1))
        return self.folder(version)


def random_samples(count: int, seed: int = 0, longest: int = 60) -> list[Sample]:
    """Samples of very different lengths, the shortest a prompt and a response of one token each."""
    generator = np.random.default_rng(seed)
    samples = [_sample(generator, 1, 1)]
    while len(samples) < count:
        prompt = int(generator.integers(1, 8))
        samples.append(_sample(generator, prompt, int(generator.integers(1, longest - prompt))))
    return samples


def _sample(generator: np.random.Generator, prompt: int, response: int) -> Sample:
    return Sample(
        token_ids=generator.integers(0, VOCAB, prompt + response).astype(np.int32),
        log_probs_R=(-4.8 + generator.normal(size=response)).astype(np.float32),
        versions_R=np.zeros(response, dtype=np.int32),
        advantage=float(generator.normal()),
    )
