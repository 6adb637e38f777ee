"""Launchers of SGLang servers and routers with an API key, run by path in SGLang's environment.

That environment lacks this package: files here import only the standard library, SGLang and each other.
"""
