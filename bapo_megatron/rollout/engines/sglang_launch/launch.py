"""Launcher of an SGLang server with an API key: ``sglang.launch_server``, same flags.

Run by path, in SGLang's environment. The key is in the file that BAPO_SGLANG_API_KEY_FILE names, not in a
flag, which every user of the machine could read. SGLang's spawned worker processes import this file again.
"""

import os
import sys

import access  # this file's folder is first on sys.path

key = access.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        arguments = prepare_server_args(sys.argv[1:])
        arguments.api_key = key
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
