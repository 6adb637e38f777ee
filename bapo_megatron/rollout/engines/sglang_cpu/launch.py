"""``sglang.launch_server`` on a machine without a GPU. Takes its flags; run by path, in SGLang's environment.

SGLang's worker processes are spawned and import this file again, so the stand-ins come first, at its top.
"""

import os
import sys

import stand_ins  # the folder of this file comes first on the path; so does sgl_kernel

stand_ins.install()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    arguments = prepare_server_args(sys.argv[1:])
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
