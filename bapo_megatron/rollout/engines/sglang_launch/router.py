"""The launcher of SGLang's router with an API key: ``sglang_router.launch_router``, same flags.

Run by path, in SGLang's environment. The key is in the file that BAPO_SGLANG_API_KEY_FILE names: the router
itself takes a key only in its command line, where every user of the machine could read it.
"""

import sys

import access  # the folder of this file comes first on the path

key = access.install()

if __name__ == "__main__":
    from sglang_router.launch_router import launch_router, parse_router_args

    arguments = parse_router_args(sys.argv[1:])
    arguments.api_key = key
    launch_router(arguments)
