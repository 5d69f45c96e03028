"""The errors a user may see.

The command line prints an `AttnError` as one line, after its `heading`, and exits with its
`exit_code`; a service answers with a 4xx status. Anything else is a bug and keeps its traceback.
"""


class AttnError(Exception):
    """An error that the user can fix. Its message says what happened and what to do in a line."""

    exit_code = 2
    # What the line begins with.
    heading = "error"


class OptionError(AttnError):
    """An option, or a combination of options, that cannot be used."""


class MissingExtraError(AttnError):
    """A feature whose optional packages are not installed, or whose device does not answer."""


class RecordError(AttnError):
    """Input that is not a fingerprint record."""


class StoreError(AttnError):
    """A store that cannot be opened, read or written."""


class WriteError(AttnError):
    """A file that cannot be written: the disk is full, or the folder is read-only."""


class ArtifactError(AttnError):
    """A run folder or artifact that is missing, damaged or of another version."""


class RunError(AttnError):
    """A discovery run that cannot be started, or cannot be resumed."""


class BusyError(RunError):
    """Another job is writing to the output folder, so that there is nothing to do here."""

    exit_code = 5


class NewRunNeededError(RunError):
    """A discovery run that cannot be finished by resuming it."""
