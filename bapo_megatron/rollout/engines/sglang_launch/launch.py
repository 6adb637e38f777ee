"""Launcher of an SGLang server with an API key: ``sglang.launch_server``, same flags.

Run by path, in SGLang's environment. The key is in the file that BAPO_SGLANG_API_KEY_FILE names, not in a
flag, which every user of the machine could read. SGLang's spawned worker processes import this file again.
"""

import access  # this file's folder is first on sys.path

key = access.install()

if __name__ == "__main__":
    access.serve(key)
