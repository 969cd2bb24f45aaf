"""minieagle: DeepSeek-V3-architecture inference with an EAGLE-3 drafter, where speculation never changes the output.

from minieagle import LLM, generate
generate("I would like to book a table", spec=True)     # the embedded model
LLM("path/to/model", drafter="path/to/drafter").chat([{"role": "user", "content": "Hello"}])
"""

from minieagle.engine import EngineConfig
from minieagle.errors import MinieagleError, ModelError, RequestError
from minieagle.llm import LLM, Result, generate
from minieagle.sampling import SamplingParams
from minieagle.spec.tree import StaticTree, TreeShape

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "EngineConfig",
    "MinieagleError",
    "ModelError",
    "RequestError",
    "Result",
    "SamplingParams",
    "StaticTree",
    "TreeShape",
    "generate",
]
