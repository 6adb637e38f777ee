"""Launcher of an SGLang server on a CPU: ``sglang.launch_server`` with stand-ins and API key, same flags.

Run by path, in SGLang's environment; the key is in the file that BAPO_SGLANG_API_KEY_FILE names, if set. For
a faster start workers are forked, which shares imports (CUDA would not survive it), only the served model's
module is imported, and garbage collection, which takes a fifth of a start, is off meanwhile.
"""

import argparse
import gc
import multiprocessing
import sys
from pathlib import Path

import stand_ins  # this file's folder, with sgl_kernel, is first on sys.path

sys.path.insert(1, str(Path(__file__).parents[1] / "sglang_launch"))

import access

gc.disable()
stand_ins.install()  # before any sglang import, which fails without them
key = access.install()

if __name__ == "__main__":
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: set_method("fork", force=True)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", type=Path)
    if model := parser.parse_known_args()[0].model_path:
        stand_ins.import_one_model(model)
        sys.argv += stand_ins.flags_of(model)
    stand_ins.unpin()
    stand_ins.replace_triton()
    import sglang.launch_server  # noqa: F401

    gc.freeze()  # imports stay
    gc.enable()
    access.serve(key)
