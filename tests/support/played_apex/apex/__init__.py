"""NVIDIA's apex as megatron-core and a policy see it: its names and its optimizer's state, on a CPU.

Not a copy: each class does in torch what apex 0.1 documents. Norms raise, since no policy here may call them.
"""
