"""Study of P3O against BAPO and GRPO, on the second study's task and with its runs."""
