"""``bapo doctor``: checks of the installation, the machine, the servers and a recipe, printed as rows.

``doctor.run_doctor`` runs them. They must work on a broken installation: these modules need only the standard
library to load, and what may hang or crash (such as an import of PyTorch) runs in a child process with a
deadline. A check that fails becomes a row, not an exception.
"""
