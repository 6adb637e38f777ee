"""Errors that a user can mend, told in one message."""


class ConfigError(Exception):
    """A recipe, flag or input file is wrong. The command line prints the message and exits with code 2."""


class GapError(ConfigError):
    """Engine and trainer disagree more than the run allows. To start again unchanged would not help."""


class CheckpointError(ConfigError):
    """A checkpoint is incomplete or damaged."""


class ResumeError(ConfigError):
    """What was loaded is not what the checkpoint says was saved. No step was made."""


class Interrupted(Exception):
    """The run was told to stop and is saved. The command line says so and exits with code 85."""


class RunStopped(Exception):
    """The run cannot go on now; its steps are saved. The command line prints why and exits with code 3."""
