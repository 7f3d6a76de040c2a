"""What makes execution faster. All of it can be left out: each part has a plain form in torch.

Attention is a paged kernel, in Numba on a CPU (``cpu``) and in the Triton language on a GPU
(``gpu``). Small operations are fused where a module has a known structure and gives the same
numbers on a trial input (``fused``). On a CPU weights are also packed once.
"""
