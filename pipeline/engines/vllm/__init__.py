"""Capture inside vLLM's server, by its own plug-in interface. Nothing of vLLM is changed.

    plugin         the entry point, our options, and what is hooked in a process that answers
    model_hooks    what is hooked in processes that schedule or run the model
    hooking        how, and whether it still fits
    scheduling     in the engine's process: which tokens of a captured request are kept
    model_process  in each worker: attention backends in the built-in ones' places, steps and rows
    replies        what was captured, from a worker to the process that answers
    answers        in the process that answers: requests on their way, attention on its way back

What a request wants travels to the workers in its `vllm_xargs`, which vLLM makes the `extra_args`
of its sampling parameters.

Source: vLLM 0.33.0, with its V2 model runner.
"""
