"""``bapo doctor``: installation check of packages, machine and servers, and of whether a recipe could start.

It must work where the rest does not. So its modules import the standard library alone, other code runs in
child processes with a deadline, and a failure there becomes a row of the table.
"""
