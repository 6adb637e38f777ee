"""``sglang_router.launch_router`` with the key of the file that BAPO_SGLANG_API_KEY_FILE names. Takes its
flags; run by path, in SGLang's environment: the router itself takes a key in its command line only."""

import sys

import access  # the folder of this file comes first on the path

access.install()

if __name__ == "__main__":
    from sglang_router.launch_router import launch_router, parse_router_args

    arguments = parse_router_args(sys.argv[1:])
    arguments.api_key = access.given_key()
    launch_router(arguments)
