"""The ``bapo verify-parallel`` check: log-probs, bounds, loss and gradient norm of a canary batch.

``run_verify`` raises SystemExit(1) if the recipe's layout differs from its reference. The canary batch is
random sequences, so the check needs the recipe and the model, but no dataset, tokenizer or run directory. It
writes a layout reference (``--save``), compares with one (``--certificate``), or both. With neither, it
measures first the layout of ``--reference.*`` (by default one process), then the recipe's, each in new
processes, and compares them. Under a launcher it runs in the launcher's processes. The loss is ``clip``,
BAPO's, whatever ``algorithm.loss`` is, with ``algorithm.terms``. To measure the gradient norm the check makes
one update, unless log-probs are not finite, and discards the updated weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.algo.bounds import Bounds, search_bounds, sum_count
from bapo_megatron.algo.losses.clip import ClipLoss
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.terms import build_terms, check_terms
from bapo_megatron.commands.layout_reference import (
    TOLERANCES,
    LayoutReference,
    QuantityRow,
    TokenOutputs,
    Totals,
    compare_layouts,
    comparison_table,
    first_differing_row,
    first_not_finite,
    identity_differences,
    not_measured,
    read_layout_reference,
    write_layout_reference,
)
from bapo_megatron.commands.verify_flags import VerifyConfig
from bapo_megatron.config import RunConfig
from bapo_megatron.config.validation import flat
from bapo_megatron.data.canary import canary_sequences, scored, unscored, with_random_routes
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import read_model_shape
from bapo_megatron.hf.weight_files import weight_files
from bapo_megatron.interfaces import Policy
from bapo_megatron.policy.layout import data_parallel_size, parallel_processes
from bapo_megatron.runtime.device import silence_libraries
from bapo_megatron.runtime.distributed import (
    all_gather,
    broadcast_from_main,
    is_main,
    launched_world_size,
    run_processes,
)
from bapo_megatron.runtime.files import check_output_file
from bapo_megatron.runtime.text_table import text_table
from bapo_megatron.tensor_types import MicroBatch
from bapo_megatron.trainer.build import build_policy
from bapo_megatron.trainer.kernel_check import check_kernels
from bapo_megatron.trainer.preflight import check_weights

_PLACES, _PLACE_BYTES = 64, 4096
_EXPERTS = {"EP": "parallel.expert", "ETP": "parallel.expert_tensor"}
_BySample = dict[int, tuple[np.ndarray, np.ndarray]]


def measure_tokens(policy: Policy, config: RunConfig, samples: Sequence[Sample]) -> TokenOutputs:
    """Return log-probs and entropies at every predicting position, equal on all ranks. Collective."""
    packs = _packs(policy, config, samples)
    mine: _BySample = {}
    for pack, stats in zip(packs, policy.log_probs(packs), strict=True):
        for index, start, length in pack.rows:
            log_prob, entropy = (values[start : start + length].cpu().numpy().copy() for values in stats)
            mine[index] = (log_prob, entropy)
    by_sample: _BySample = {}
    for ranks in all_gather(mine):  # ranks of one replica have the same values
        by_sample = {**ranks, **by_sample}
    ordered = [by_sample[index] for index in range(len(samples))]
    return TokenOutputs([log_prob for log_prob, _ in ordered], [entropy for _, entropy in ordered])


def measure_totals(
    policy: Policy, config: RunConfig, samples: Sequence[Sample], at: Bounds | None = None
) -> Totals:
    """Return the totals of one update on ``samples`` by BAPO's loss and the run's terms, equal on all ranks.

    Collective; changes the policy's weights. The bounds are searched on the whole update even under ``scope:
    micro_batch``, where they would depend on the packs. Loss and gradient are taken ``at`` the given bounds
    (the reference's), or else at the bounds found, so that each quantity is judged separately.
    """
    packs = _packs(policy, config, samples)
    bounds = replace(config.algorithm.bounds, bounds_tokens=None)
    loss = ClipLoss(replace(config.algorithm, bounds=bounds))
    sums = policy.token_sums(packs, loss.search.measure)
    chosen = loss.search.find(sums)
    used = chosen if at is None else at
    objective = Objective(loss, terms=build_terms(config.algorithm))
    result = policy.update(packs, objective.token_fn(used, policy.version))
    tokens = sum(sample.trained_tokens for sample in samples)
    loss_mean = float(result.sums[0]) / tokens
    return Totals(sums.numpy(), chosen.low, chosen.high, loss_mean, result.grad_norm)


def _packs(policy: Policy, config: RunConfig, samples: Sequence[Sample]) -> list[MicroBatch]:
    routed = with_random_routes(samples, config.seed, read_model_shape(config.model.hf_path))
    return pack_samples(
        routed,
        config.batch.pack_tokens,
        config.algorithm.loss_mean,
        policy.pack_layout,
        config.rollout.max_response_tokens,
    )


def model_digests(folder: Path) -> dict[str, str]:
    """Return SHA-256 digests (16 hex digits) of ``config.json`` and of samples of the weight files.

    The weight digest covers each file's name, size, and 64 places of 4 KiB, evenly spaced from the first byte
    (the header: tensor names, types, shapes) to the last. It takes a second for a 60 GB model and tells
    training runs apart, but can miss a change of a few numbers, and differs if the same weights are split
    otherwise.
    """
    weights = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        weights.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(_PLACES):
                file.seek(max(0, size - _PLACE_BYTES) * place // (_PLACES - 1))
                weights.update(file.read(_PLACE_BYTES))
    config = hashlib.sha256((folder / "config.json").read_bytes())
    return {"config_sha256": config.hexdigest()[:16], "weights_sha256": weights.hexdigest()[:16]}


def run_verify(config: VerifyConfig) -> None:
    """Check the layout in the processes it needs. Raises SystemExit(1) if it differs from its reference."""
    launched = launched_world_size()
    processes = data_parallel_size(config.parallel, launched) * config.parallel.model_size
    check_verify(config, launched is not None)
    if launched is not None:
        verify_process(config)
    elif config.runs_reference:
        _run_both_layouts(config, processes)
    else:
        run_processes(verify_process, (config,), processes, apart=True)


def _run_both_layouts(config: VerifyConfig, processes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.npz"
        reference = dataclasses.replace(config, parallel=config.reference, save=path)
        count = config.reference.model_size * (config.reference.data or 1)
        print(f"the reference, in {count} process(es), then the recipe's layout, in {processes}", flush=True)
        run_processes(verify_process, (reference,), count, apart=True)
        compared = dataclasses.replace(config, certificate=path)
        run_processes(verify_process, (compared,), processes, apart=True)


def verify_process(config: VerifyConfig) -> None:
    """Entry point of one rank. Raises SystemExit(1) on every rank if the layout differs."""
    silence_libraries()
    with parallel_processes(config.parallel):
        code = verify_layout(config)
    if code:
        sys.exit(code)


def check_verify(config: VerifyConfig, launched: bool) -> None:
    """Check the configuration before any process group exists. Raises ConfigError for the first mistake."""
    config.check()
    if launched and config.runs_reference:
        raise ConfigError(
            "under a launcher there is only the recipe's layout, and nothing to compare it with: first "
            "write a certificate at a smaller layout (--save FILE with other --parallel flags), then give "
            "it here with --certificate FILE; started by hand, the command runs both layouts itself"
        )
    check_weights(config.model, config.parallel)
    check_terms(config.algorithm)
    _check_canary(config)
    if config.runs_reference:
        _check_reference(config)
    if config.certificate is not None:
        _matching_reference(config.certificate, config)
    if config.save is not None:
        check_output_file("--save", config.save)


def _check_canary(config: VerifyConfig) -> None:
    canary, positions = config.canary, read_model_shape(config.model.hf_path).max_positions
    most = min(config.longest_sequence, positions)
    if not 2 <= canary.longest <= most:
        raise ConfigError(
            f"longest={canary.longest} must be from 2 to {most}, the run's longest sequence that the model "
            "takes: set --longest"
        )
    if canary.tokens < canary.longest + 2:
        raise ConfigError(
            f"tokens={canary.tokens} must be at least {canary.longest + 2}: the canary holds one sequence "
            f"of {canary.longest} tokens and one of 2; raise --tokens or lower --longest"
        )


def _check_reference(config: VerifyConfig) -> None:
    try:
        dataclasses.replace(config, parallel=config.reference).check()
        check_weights(config.model, config.reference)
    except ConfigError as error:
        raise ConfigError(f"the reference's layout (--reference.*): {error}") from None


def verify_layout(config: VerifyConfig) -> int:
    """Measure the recipe's layout, then write it as a reference or compare it with one. Collective. Returns
    the exit code, equal on every rank: 1 if any quantity differs, else 0."""
    reference = None if config.certificate is None else _matching_reference(config.certificate, config)
    check_kernels(config.model, config.parallel)
    policy = build_policy(config)
    ours = measure_layout(policy, config, reference)
    code = 0
    if is_main():
        if config.save is not None:
            write_layout_reference(config.save, ours)
        code = _print_comparison(reference, ours, config) if reference else 0
    return broadcast_from_main(code)


def measure_layout(
    policy: Policy, config: VerifyConfig, reference: LayoutReference | None
) -> LayoutReference:
    """Measure this layout on the canary batch, or the reference's samples. Collective; makes an update. If
    log-probs are not finite, returns nan totals, or without a reference raises FloatingPointError."""
    bounds = config.algorithm.bounds
    sequences = [] if reference else canary_sequences(config.canary, bounds)
    samples = reference.samples if reference else unscored(sequences)
    tokens = measure_tokens(policy, config, samples)
    broken = first_not_finite(tokens, samples)
    if reference is None:
        if broken:
            raise FloatingPointError(f"the log-probs of this layout are not finite: first at {broken}")
        samples = scored(sequences, tokens.log_probs)
        totals = measure_totals(policy, config, samples)
    elif broken:
        totals = not_measured(reference.totals)
    else:
        at = search_bounds(reference.totals.sums[: sum_count(bounds)].tolist(), bounds)
        totals = measure_totals(policy, config, samples, at)
    return LayoutReference(_identity(config), _provenance(config, policy), samples, tokens, totals)


def _matching_reference(path: Path, config: VerifyConfig) -> LayoutReference:
    reference = read_layout_reference(path)
    differences = identity_differences(reference, _identity(config))
    if differences:
        raise ConfigError(
            f"certificate {path} is of something else:\n"
            + "\n".join(differences)
            + "\nset these as they were, or make the certificate again"
        )
    return reference


def _identity(config: VerifyConfig) -> dict[str, Any]:
    """Return a measurement's identity, equal in comparable layouts: model, canary and objective."""
    has_experts = read_model_shape(config.model.hf_path).experts is not None
    named: dict[str, dict[str, Any]] = {
        "model": {**model_digests(config.model.hf_path), "dtype": config.model.dtype},
        # Certificates of earlier versions have the routers' own routes, which depend on rounding.
        "canary": {**dataclasses.asdict(config.canary), **({"routes": "random"} if has_experts else {})},
        "rollout": {"temperature": config.rollout.temperature},
        "algorithm": {"loss_mean": config.algorithm.loss_mean, **flat(config.algorithm.bounds, "bounds.")},
    }
    if config.algorithm.loss_mean == "constant":  # it is the divisor
        named["rollout"]["max_response_tokens"] = config.rollout.max_response_tokens
    if config.algorithm.terms:
        named["algorithm"]["terms"] = [dataclasses.asdict(term) for term in config.algorithm.terms]
    return {f"{part}.{name}": value for part, fields in named.items() for name, value in fields.items()}


def _provenance(config: VerifyConfig, policy: Policy) -> dict[str, Any]:
    parallel = dataclasses.replace(config.parallel, data=policy.pack_layout.data_size)
    return {
        **flat(parallel, "parallel."),
        "batch.pack_tokens": config.batch.pack_tokens,
        "batch.recompute": config.batch.recompute,
        **{package: version(package) for package in ("torch", "megatron-core")},
    }


def _print_comparison(reference: LayoutReference, ours: LayoutReference, config: VerifyConfig) -> int:
    own = {name: value for name, value in vars(config.tolerance).items() if value is not None}
    tolerances = dataclasses.replace(TOLERANCES[config.model.dtype], **own)
    rows = compare_layouts(reference, ours.tokens, ours.totals, config.algorithm.bounds, tolerances)
    layouts = text_table([("reference:", _layout(reference)), ("this layout:", _layout(ours))])
    print("", *layouts, "", comparison_table(rows), "", _verdict(rows, reference), sep="\n", flush=True)
    return 0 if first_differing_row(rows) is None else 1


def _verdict(rows: Sequence[QuantityRow], reference: LayoutReference) -> str:
    lines = [f"a tie: {row.quantity}: {row.detail}" for row in rows if row.verdict == "tie"]
    first = first_differing_row(rows)
    samples = reference.samples
    if first is None:
        tokens = sum(sample.positions for sample in samples)
        lines.append(f"all {len(rows)} quantities agree over {tokens} tokens of {len(samples)} samples")
    else:
        lines.append(f"the layouts differ, first in the {first.quantity}: {first.detail}")
    return "\n".join(lines)


def _layout(measured: LayoutReference) -> str:
    made = measured.made
    sizes = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual", "CP": "context", "DP": "data"}
    parts = [f"{short} {made[f'parallel.{name}']}" for short, name in sizes.items()]
    parts += [f"{short} {made[name]}" for short, name in _EXPERTS.items() if made.get(name, 1) > 1]
    if layers := made.get("parallel.pipeline_layers"):
        parts.append(f"stages of {' '.join(map(str, layers))} layers")
    parts.append(f"SP {'on' if made['parallel.sequence'] else 'off'}")
    parts.append(f"packs of {made['batch.pack_tokens']}, recompute {made['batch.recompute']}")
    parts.append(f"torch {made['torch']}, megatron-core {made['megatron-core']}")
    return ", ".join(parts)
