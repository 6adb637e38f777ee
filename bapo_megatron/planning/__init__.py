"""Planning: whether a job fits and how fast it is, by arithmetic (a plan) or a dry run (a rehearsal).

``plan.make_plan(job)`` returns a ``JobPlan``; a ``Job`` is a recipe, its model's shape and a GPU type.
Rehearsals (``bapo_rehearsal``) use the same ``Job`` and ``Verdict``. These modules load without torch, so
that ``bapo plan`` is fast.
"""
