"""The ``sglang`` backend: clients and supervisors of SGLang servers. Never imports SGLang itself."""
