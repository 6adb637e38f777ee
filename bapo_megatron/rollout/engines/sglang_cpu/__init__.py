"""SGLang on a CPU: launcher and stand-in modules with which the unmodified package serves without a GPU.

This project imports nothing from here: ``launch.py`` runs in SGLang's own virtual environment.
"""
