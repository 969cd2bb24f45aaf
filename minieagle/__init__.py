"""minieagle: a compact inference engine for DeepSeek-V3-architecture models with EAGLE-3 tree speculation.

This folder holds the engine and what a user touches: the Python API, scheduler, sampling, tokenizer, command line and
server. Tensor code lives in `models/`, speculation in `spec/`, process groups in `dist/`; they stand at the top level
of the repository and are imported as `minieagle.models`, `minieagle.spec` and `minieagle.dist`.
"""

__version__ = "0.1.0"
