"""``bapo doctor``: what is installed, what the machine grants, and whether a recipe could start.

It must work where the rest does not. So its modules import the standard library alone, other code runs in
child processes with a deadline, and what fails there becomes a row of the table.
"""
