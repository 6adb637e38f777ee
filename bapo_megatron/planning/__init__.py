"""Planning: whether a job fits and how fast it is, by arithmetic (a plan) or by a dry run (a rehearsal).

Both are of a ``Job``, and have one page, one JSON and one ``Verdict``. The modules here load without torch
(another loss than ``clip`` imports it): ``bapo plan`` answers at once. ``rehearsal/`` imports them, not the
other way round.
"""
