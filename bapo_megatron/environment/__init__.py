"""Environments: what answers the turns of a model, a tool, a game or a user.

``from bapo_megatron.environment import Environment`` is the import of users' files.
"""

from bapo_megatron.environment.interface import Environment, Reply, Task, Turn, unjudged

__all__ = ["Environment", "Reply", "Task", "Turn", "unjudged"]
