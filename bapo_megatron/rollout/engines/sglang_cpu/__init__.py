"""SGLang on a CPU: a launcher and stand-in modules that let the unmodified package serve without a GPU.

This project imports nothing from here: ``launch.py`` runs in SGLang's virtual environment.
"""
