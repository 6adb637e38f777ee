"""Entry point of the ``bapo-ckpt`` command line, ``main``: parses a command, runs it, exits with its code.

ConfigError (its subclass CheckpointError too) and OSError become one message and exit code 2. SIGTERM exits
with 143, after half-written output is removed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from bapo_megatron.errors import ConfigError, printable

USAGE = """\
usage: bapo-ckpt COMMAND ...

  to-megatron HF_DIR OUT      a Hugging Face folder as a torch_dist checkpoint of megatron-core
  to-hf CHECKPOINT OUT        a checkpoint of Megatron, or of a run, as a Hugging Face folder
  reshard CHECKPOINT OUT      a checkpoint with another grid of chunks or padding
  inspect PATH                what a checkpoint is: format, model, optimizer, sizes, keys
  verify A B                  whether two checkpoints, of any formats, are equal bit for bit
  verify RUN                  whether a run's checkpoint has every bit that was written

`bapo-ckpt COMMAND --help` lists the flags. No GPU, no torchrun, at most 400 MiB of memory.
"""


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes half-written output
    if sys.argv[1:2] in (["inspect"], ["verify"]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `bapo-ckpt inspect ... | head` ends quietly
    # A conversion continues if nobody reads its lines any more: `... 2>&1 | tee log`, and tee is gone.
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:  # at exit it would change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code: 0 done, 1 verify found a difference or damage, 2 bad input or an
    unreadable or unwritable file, 130 interrupted. Other errors propagate."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    import tyro  # not needed for help

    from checkpoints_tools.commands import COMMANDS

    try:
        if arguments[0] not in COMMANDS:
            raise ConfigError(f"unknown command {arguments[0]!r}; there are {', '.join(COMMANDS)}")
        kind = COMMANDS[arguments[0]]
        return tyro.cli(kind, prog=f"bapo-ckpt {arguments[0]}", args=list(arguments[1:])).run()
    except ConfigError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except OSError as error:  # no permission, a read-only or failing disk; 1 would say that two models differ
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        print(printable(f"error: {what}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; nothing was left behind", file=sys.stderr)
        return 130


if __name__ == "__main__":
    main()
