"""Launchers of SGLang servers and routers with an API key.

``launch.py`` and ``router.py`` are run by path, in SGLang's environment, where this package is not installed:
so the files here import only the standard library, SGLang and each other.
"""
