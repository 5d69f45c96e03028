"""The /discovery routes: what is served, the job that is at work, and the runs on disk."""
