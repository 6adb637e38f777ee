"""Planning: whether a job fits and how fast it is, by arithmetic (a plan) or a dry run (a rehearsal).

Both take a ``Job`` and share a page format, a JSON format and ``Verdict``. These modules load without torch
(except for a loss other than ``clip``), so ``bapo plan`` answers at once; ``rehearsal/`` imports them.
"""
