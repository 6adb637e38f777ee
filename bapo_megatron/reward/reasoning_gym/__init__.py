"""The reward ``reasoning_gym``: responses scored by the verifiers of reasoning-gym's tasks."""
