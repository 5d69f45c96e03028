"""Capture inside SGLang's server, by its own plug-in interface. Nothing of SGLang is changed.

    plugin        the entry point: which functions of SGLang are hooked, and if they still fit
    command_line  our options on SGLang's own command line
    layers        what of the served model can be captured
    full_scores   [T, H, T] of requests with attn_capture, beside the recorder
    recorder      in the process that runs the model: steps, rows, and their requests
    answers       in the process that answers: attention into responses

SGLang runs a process for HTTP, one for the model and one for text. What a request wants travels
from the first to the second in its `custom_params`, and what was found back as `meta_info`.

Source: SGLang 0.5.23.
"""
