"""Preflight of the sandbox: code rewards need every layer of isolation, its walls.

With ``reward.allow_weak_sandbox`` missing walls are only noted. It runs a trial program in a real sandbox.
Called by preflight, reward workers, `bapo eval` and `bapo doctor`. Used in ``commands/``, ``environment/``,
``evaluation/``, ``reward/`` and ``trainer/``.
"""

from __future__ import annotations

from collections.abc import Sequence

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.sandbox.sandbox import Sandbox, SandboxError

FIX = (
    "in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
    "elsewhere: sysctl -w user.max_user_namespaces=15000"
)
"""Settings that grant namespaces, for messages."""

_PROBE_S = 20.0


def sandbox_notes() -> list[str]:
    """Missing walls on this machine, found by a trial program; SandboxError if the sandbox does not work."""
    with Sandbox("print(input())", "", memory_mb=1024, case_limit_s=_PROBE_S) as sandbox:
        ended = sandbox.run("seen", limit_s=_PROBE_S)
        if ended is None or ended.output != "seen\n":
            raise SandboxError(f"the sandbox for code rewards does not work on this machine: {ended}")
        return sandbox.notes


def checked_sandbox(allow_weak: bool) -> list[str]:
    """``sandbox_notes``. ConfigError if the sandbox does not work, or lacks walls without ``allow_weak``."""
    try:
        notes = sandbox_notes()
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    if notes and not allow_weak:
        raise ConfigError(refusal(notes))
    return notes


def refusal(notes: Sequence[str]) -> str:
    """Message about missing walls, with the fix."""
    return (
        f"the sandbox for code rewards lacks walls on this machine: {'; '.join(notes)}. Grant namespaces "
        f"({FIX}), or run without these walls by reward.allow_weak_sandbox=True (docs/rewards.md#the-sandbox)"
    )
