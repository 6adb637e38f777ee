"""The launcher of an SGLang server with an API key: ``sglang.launch_server``, same flags.

Run by path, in SGLang's environment. The key is in the file that BAPO_SGLANG_API_KEY_FILE names: in a command
line every user of the machine could read it. SGLang's worker processes are spawned and import this again.
"""

import os
import sys

import access  # the folder of this file comes first on the path

key = access.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(access.with_key(prepare_server_args(sys.argv[1:]), key))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
