"""``bapo doctor``: checks of the installation, the machine, the servers and a recipe, printed as rows.

``doctor.run_doctor`` runs them. It must work when the rest does not: its modules load with the standard
library alone, and anything that may hang or crash (importing PyTorch, for one) runs in a child process with a
deadline. A failure becomes a row.
"""
