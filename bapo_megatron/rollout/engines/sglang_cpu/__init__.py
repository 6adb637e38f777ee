"""What the unmodified SGLang package needs to serve on a machine without a GPU.

Nothing here is imported by this project: ``launch.py`` runs in SGLang's own virtual environment.
"""
