import torch

# Threads that wait for a core in a spin loop make short ops ten times slower on a shared machine.
torch.set_num_threads(1)
