"""What every test shares: a hypothesis profile for two cores, and no network for the oracles."""

import os

import torch
from hypothesis import HealthCheck, settings

# Read by the hub client when it is first imported, so they are set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Read by Triton when it is first imported: its kernels are interpreted, so that they run without a GPU.
os.environ["TRITON_INTERPRET"] = "1"

# No test asserts a time, so none has a deadline. Examples are drawn anew in every run and a failing one is printed with
# the line that repeats it; tests of tensor algebra that can afford more say so themselves.
settings.register_profile(
    "minieagle", deadline=None, max_examples=25, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("minieagle")

# One thread: the models of the tests are small, and two threads on busy cores wait for each other at every product.
torch.set_num_threads(1)
