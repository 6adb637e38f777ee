"""Study of P3O: BAPO, GRPO and P3O on the second study's task, whose runs of BAPO and GRPO it reads."""
