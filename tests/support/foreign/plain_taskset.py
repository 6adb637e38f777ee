"""The same tasks in verifiers' environment of a single agent, which answers once."""

from guess_taskset import GuessTaskset

__all__ = ["GuessTaskset"]
