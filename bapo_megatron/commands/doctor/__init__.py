"""``bapo doctor``: installation check of packages, machine and servers, and of whether a recipe could start.

It must work where the rest does not. So its modules need the standard library alone to load; what may hang or
break, as an import of PyTorch, runs in a child process with a deadline, and a failure becomes a row of the
table.
"""
