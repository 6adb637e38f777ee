"""The ``sglang`` backend: clients and supervisors of SGLang servers (``backend.py``); imports no SGLang."""
