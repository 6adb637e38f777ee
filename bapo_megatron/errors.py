"""Errors that a user can mend, told in one message."""


class ConfigError(Exception):
    """A recipe, flag or input file is wrong. The command line prints the message and exits with code 2."""


class CheckpointError(ConfigError):
    """A checkpoint is incomplete or damaged."""
