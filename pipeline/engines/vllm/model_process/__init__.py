"""The plug-in in a worker, which runs the model: which rows of its steps are captured, and what
became of them. May import all of `capture_kernels` and `pipeline.engines.serving`, and of the
plug-in `replies` and `scheduling`."""
