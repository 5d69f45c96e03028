"""The plug-in in the process that runs the model: which rows of its steps are captured, and what
became of them. May import all of `capture_kernels` and `pipeline.engines.serving`, and of the
plug-in what both processes share: `recorder_keys`."""
