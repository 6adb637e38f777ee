"""The launch of SGLang servers and routers with an API key.

``launch.py`` and ``router.py`` are run by path, in SGLang's environment. Of the package they see this folder
alone, so its files import the standard library, SGLang and each other.
"""
