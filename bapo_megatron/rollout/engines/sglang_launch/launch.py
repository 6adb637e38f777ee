"""``sglang.launch_server`` with the key of the file that BAPO_SGLANG_API_KEY_FILE names. Takes its flags; run
by path, in SGLang's environment: in a command line every user of the machine could read the key.

SGLang's worker processes are spawned and import this file again.
"""

import os
import sys

import access  # the folder of this file comes first on the path

access.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(access.require_key(prepare_server_args(sys.argv[1:])))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
