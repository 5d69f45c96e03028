"""Where no CUDA device answers, kernels run in Triton's interpreter.

Triton asks for the variable when it is imported and when a kernel is decorated: it is set here,
before any test module is imported. It reaches the processes that tests start as well; one that
compiles a kernel must be started without it.
"""

import os
from importlib.util import find_spec

if find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        if find_spec("triton"):
            import quick_interpreter

            quick_interpreter.use()
