"""The ``sglang`` backend: clients and supervisors of SGLang servers. SGLang itself is never imported here."""
