"""``sglang.launch_server`` on a machine without a GPU, with the key of the file that BAPO_SGLANG_API_KEY_FILE
names, if any. Takes its flags; run by path, in SGLang's environment.

SGLang's worker processes are forked here, where SGLang spawns them: they import nothing anew, and importing
is most of a start. CUDA would survive no fork.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import stand_ins  # the folder of this file comes first on the path; so does sgl_kernel

sys.path.insert(1, str(Path(__file__).parents[1] / "sglang_launch"))

import access

stand_ins.install()
access.install()

if __name__ == "__main__":
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: set_method("fork", force=True)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(access.require_key(prepare_server_args(sys.argv[1:])))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
