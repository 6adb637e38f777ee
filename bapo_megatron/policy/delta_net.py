"""Gated DeltaNet for packed sequences: ``DocumentDeltaNet``, which replaces a layer's attention.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T      u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)      o_t = S_t^T q_t

for each value head, from S = 0 at the start of each document, with q and k normalized to length 1 (then q /
sqrt(d)), beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias), after a causal convolution and silu.

On a CPU, and in float32, ``chunked_rule`` computes this rule in torch, in chunks of 64 tokens: within a chunk
the u solve a triangular system, so the state is computed once per chunk (Yang et al. 2024, arXiv 2412.06464).
In half precision on a GPU ``kernel_rule`` calls flash-linear-attention (fla), whose kernels
``kernel_check.py`` tests before a policy is built. Neither synchronizes with the device.

Context parallelism: an all-to-all gives each CP rank all tokens of some heads; another returns the outputs to
the token layout. Output gate and norm work on that layout. TP x CP divides the key heads (``layout.py``).

Shapes: ``_L`` tokens on this rank, ``_T`` of the pack, ``_P`` rows of all padded batches, ``_D`` channels; in
the rule [batch, heads, chunks, tokens, width].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from bapo_megatron.layers.delta_net import CHUNK, DeltaNet
from bapo_megatron.policy.attention import DocumentPack, gather_rows, padding_plan, rows_on
from bapo_megatron.policy.layers import Builder
from bapo_megatron.policy.megatron_versions import split_tensor_factory

_EPS = 1e-6  # epsilon of query and key normalization, as in Hugging Face's models


class DeltaNetBuilder(Builder):
    """Builder of Gated DeltaNet layers: puts ``DocumentDeltaNet`` into a layer's spec in place of attention.
    Its config field makes all norms of megatron's layers scale by 1 + w, as these models' do."""

    def config(self) -> dict[str, object]:
        return {"layernorm_zero_centered_gamma": True}

    def install(self, spec: ModuleSpec, config: TransformerConfig, longest: int) -> None:
        layer = spec.submodules
        layer.self_attention = ModuleSpec(
            DocumentDeltaNet, params={"kind": self.kind}, submodules=layer.self_attention.submodules
        )
        names = layer.sharded_state_dict_keys_map
        if "input_layernorm." in names:
            names["input_layernorm."] = "self_attention.in_proj.layer_norm_"


class DocumentDeltaNet(MegatronModule):  # type: ignore[misc]
    """Gated DeltaNet layer with megatron-core's parameter names and sharding. ``forward`` maps hidden states
    [tokens, 1, hidden] of a pack to the same shape; collective over TP and CP. ``submodules``: attention's;
    its linear layers become the projections."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        kind: DeltaNet,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.kind = layer_number, kind
        self.tp, self.cp = pg_collection.tp, pg_collection.cp
        self.sections = [rows // self.tp.size() for rows in kind.sections]
        heads, convolved = self.sections[-1], sum(self.sections[:3])
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp}
        self.in_proj = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            sum(kind.sections),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **options,
        )
        self.conv1d = torch.nn.Conv1d(
            convolved, convolved, kind.kernel, groups=convolved, bias=False, dtype=config.params_dtype
        )
        self.dt_bias = torch.nn.Parameter(torch.ones(heads, dtype=config.params_dtype))
        self.A_log = torch.nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.out_norm = GatedNorm(kind.value_dim, config.layernorm_epsilon)
        self.out_proj = build_module(
            submodules.linear_proj,
            kind.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **options,
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: DocumentPack, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [tokens, 1, hidden] and its bias, None."""
        bounds, kind = packed_seq_params.bounds, self.kind
        projected, _bias = self.in_proj(hidden_states)
        q, k, v, z, b, a = projected[:, 0].split(self.sections, -1)
        x_LD, sections = torch.cat([q, k, v, b, a], -1), [*self.sections[:3], *self.sections[4:]]
        size = self.cp.size()
        if size > 1:
            x_LD = self._to_heads(x_LD, sections, bounds)
            sections = [rows // size for rows in sections]
        qkv_TD, b, a = x_LD.split([sum(sections[:3]), *sections[3:]], -1)
        decay = -self._own(self.A_log).exp() * F.softplus(a.float() + self._own(self.dt_bias).float())
        rule = kernel_rule if qkv_TD.is_cuda and qkv_TD.dtype != torch.float32 else chunked_rule
        weight = self._own(self.conv1d.weight, self.sections[:3])
        out = rule(qkv_TD, decay, b.float().sigmoid(), weight, kind, bounds)
        if size > 1:
            out = self._to_tokens(out, bounds)
        out = self.out_norm(out.unflatten(-1, (-1, kind.value_dim)), z.unflatten(-1, (-1, kind.value_dim)))
        result: tuple[Tensor, Tensor | None] = self.out_proj(out.flatten(1)[:, None])
        return result

    def _own(self, parameter: Tensor, sections: list[int] | None = None) -> Tensor:
        """The slice of a parameter for this CP rank's heads."""
        size, rank = self.cp.size(), self.cp.rank()
        if size == 1:
            return parameter
        return torch.cat([part.chunk(size)[rank] for part in parameter.split(sections or len(parameter))])

    def _to_heads(self, x_LD: Tensor, sections: list[int], bounds: tuple[int, ...]) -> Tensor:
        """All tokens of the pack, in pack order, with this CP rank's heads."""
        size = self.cp.size()
        shares = [part.unflatten(-1, (size, -1)) for part in x_LD.split(sections, -1)]
        sent = torch.cat(shares, -1).transpose(0, 1).flatten(0, 1)
        return gather_rows(all_to_all(self.cp, sent), *rows_on(bounds, size, x_LD.device))

    def _to_tokens(self, out_TD: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """This CP rank's tokens, with all heads of the TP rank."""
        size = self.cp.size()
        rows, back = rows_on(bounds, size, out_TD.device)
        sent = gather_rows(out_TD, back, rows)
        received: Tensor = all_to_all(self.cp, sent).unflatten(0, (size, -1))
        return received.transpose(0, 1).flatten(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(_in_float32(fn, self.A_log), recurse)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None, **_: Any
    ) -> dict[str, Any]:
        """The state in the format of megatron-core's ``GatedDeltaNet``: one key per section."""
        groups = {"tp_group": self.tp, "dp_cp_group": metadata["dp_cp_group"]}
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        whole = {"out_norm.weight": self.out_norm.weight}
        cut = dict.fromkeys(own, 0)
        state = make_sharded_tensors_for_checkpoint({**own, **whole}, prefix, cut, sharded_offsets, **groups)
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            inner = f"{prefix}{name}."
            state |= sharded_state_dict_default(module, inner, sharded_offsets, metadata, tp_group=self.tp)
        for name, mapping in self.kind.parameters(self.config.hidden_size).items():
            key = prefix + name.removeprefix("self_attention.")
            if mapping.stored_apart:
                rows = [count // self.tp.size() for count in mapping.sections]
                endings = [ending.removeprefix(".") for ending in mapping.section_keys]
                state[key] = split_tensor_factory()(state[key], rows, endings, 0)
        return dict(state)


class GatedNorm(torch.nn.Module):
    """RMSNorm over a head's width with float32 weight w, times the output gate silu(z)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        # Each TP rank has different heads: their gradients are summed.
        weight = copy_to_tensor_model_parallel_region(self.weight)
        normalized = F.rms_norm(x.float(), weight.shape, weight, self.eps)
        return (normalized * F.silu(z.float())).to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(_in_float32(fn, self.weight), recurse)  # type: ignore[no-untyped-call]


def _in_float32(fn: Callable[[Tensor], Tensor], kept: Tensor) -> Callable[[Tensor], Tensor]:
    """Wrap ``fn``, which moves or casts a module's parameters, so that it never casts ``kept``."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(fn(tensor).device) if tensor is kept else fn(tensor)

    return moved


def kernel_rule(
    qkv_TD: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    weight: Tensor,
    kind: DeltaNet,
    bounds: tuple[int, ...],
) -> Tensor:
    """``chunked_rule`` with flash-linear-attention's kernels. Rehearsals patch this function."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    documents = _documents_on(bounds, qkv_TD.device)
    mixed, _ = causal_conv1d(qkv_TD[None], weight[:, 0], activation="silu", **documents)
    q, k, v = _heads(mixed, kind)
    columns = {"g": decay_TH[None], "beta": beta_TH[None]}
    out, _ = chunk_gated_delta_rule(q, k, v, **columns, use_qk_l2norm_in_kernel=True, **documents)
    return out[0].flatten(1)  # type: ignore[no-any-return]


@lru_cache(maxsize=16)
def _documents_on(bounds: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Kernel arguments of a pack: its bounds, and chunk indices that save a blocking read from the GPU."""
    counts = [-(-(end - start) // CHUNK) for start, end in pairwise(bounds)]
    chunks = [(document, number) for document, count in enumerate(counts) for number in range(count)]
    made = {"cu_seqlens": torch.tensor(bounds), "chunk_indices": torch.tensor(chunks)}
    return {name: indices.to(device, non_blocking=True) for name, indices in made.items()}


def chunked_rule(
    qkv_TD: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    weight: Tensor,
    kind: DeltaNet,
    bounds: tuple[int, ...],
) -> Tensor:
    """Convolution, silu and rule within each document ``bounds[d]:bounds[d + 1]``, [tokens, values]. qkv_TD:
    queries, keys and values of some heads; decay_TH: g; weight [D, 1, kernel]."""
    plan = padding_plan(bounds, qkv_TD.device)
    inputs = (gather_rows(x, plan.token_of_row_P, plan.row_of_token_T) for x in (qkv_TD, decay_TH, beta_TH))
    qkv_PD, decay_PH, beta_PH = inputs
    outputs = []
    for start, end, documents in plan.batches:
        x, g, beta = (part[start:end].unflatten(0, (documents, -1)) for part in (qkv_PD, decay_PH, beta_PH))
        padded = F.pad(x.transpose(1, 2), (weight.size(-1) - 1, 0))
        mixed = F.silu(F.conv1d(padded, weight, groups=len(weight))).transpose(1, 2)
        outputs.append(gated_delta_rule(*_heads(mixed, kind), g, beta).flatten(2).flatten(0, 1))
    out_PD = torch.cat(outputs)[:, None]
    return gather_rows(out_PD, plan.row_of_token_T, plan.token_of_row_P, plan.real_P)[:, 0]


def _heads(mixed: Tensor, kind: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Split channels into queries, keys and values [..., heads, width]."""
    share = mixed.size(-1) / (2 * kind.keys + kind.values)
    keys, values = round(kind.keys * share), round(kind.values * share)
    q, k, v = mixed.split([keys, keys, values], -1)
    q, k = (x.unflatten(-1, (-1, kind.key_dim)) for x in (q, k))
    return q, k, v.unflatten(-1, (-1, kind.value_dim))


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule for a batch [documents, tokens, heads, width], from S = 0, in float32 (or float64). Value
    heads that share a key head are adjacent."""
    tokens, shared = v.size(1), v.size(2) // k.size(2)
    work = torch.promote_types(v.dtype, torch.float32)
    q, k = (_unit(x.to(work)).repeat_interleave(shared, 2) for x in (q, k))
    q = q * k.size(-1) ** -0.5
    chunk = min(CHUNK, tokens)
    q, k, v_own, g, beta = (_in_chunks(x.to(work), chunk) for x in (q, k, v, g[..., None], beta[..., None]))
    sums = g.cumsum(-2)
    after = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (sums - sums.transpose(-1, -2)).masked_fill(after, -torch.inf).exp()
    scores = q @ k.transpose(-1, -2) * decay
    pairs = k @ k.transpose(-1, -2) * decay * beta  # the solver treats the diagonal as ones: u itself
    seen, kept = sums.exp(), (sums[..., -1:, :] - sums).exp()
    queries, keys_in, keys_out = q * seen, k * seen, k * kept
    state = v_own.new_zeros(*v_own.shape[:2], k.size(-1), v_own.size(-1))
    outputs = []
    for n in range(v_own.size(2)):
        wanted = beta[:, :, n] * (v_own[:, :, n] - keys_in[:, :, n] @ state)
        u = torch.linalg.solve_triangular(pairs[:, :, n], wanted, upper=False, unitriangular=True)
        outputs.append(queries[:, :, n] @ state + scores[:, :, n] @ u)
        state = state * seen[:, :, n, -1:] + keys_out[:, :, n].transpose(-1, -2) @ u
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2).to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[batch, tokens, heads, width] as [batch, heads, chunks, tokens, width], zero-padded at the end."""
    x = x.transpose(1, 2)
    chunks: Tensor = F.pad(x, (0, 0, 0, -x.size(2) % chunk)).unflatten(2, (-1, chunk))
    return chunks
