"""The ``sglang`` engine: a client of SGLang servers. SGLang itself is never imported here."""
