"""Planning: whether a job fits and how fast it is, by arithmetic (a plan) or a dry run (a rehearsal).

``plan.make_plan(job)`` returns a ``JobPlan``; a ``Job`` is a recipe, its model's shape and a GPU type. Plans
and rehearsals (``rehearsal/``) share the ``Job``, a page format, a JSON format and ``Verdict``. These modules
load without torch (except for a loss other than ``clip``), so ``bapo plan`` answers at once.
"""
