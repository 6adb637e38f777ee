"""Launcher of SGLang's router with an API key: ``sglang_router.launch_router``, same flags.

Run by path, in SGLang's environment. The key is in the file that BAPO_SGLANG_API_KEY_FILE names, not in the
router's own flag, which every user of the machine could read.
"""

import sys

import access  # this file's folder is first on sys.path

key = access.install()

if __name__ == "__main__":
    from sglang_router.launch_router import launch_router, parse_router_args

    arguments = parse_router_args(sys.argv[1:])
    arguments.api_key = key
    launch_router(arguments)
