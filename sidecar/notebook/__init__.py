"""A sidecar and an engine in notebooks (extra `notebooks`): both as processes of a notebook, what a
client says as tables, and the page's token view as a widget.

`local` starts the processes, `tables` reads what the sidecar's client gives, `token_view` is the
widget: the page's own modules in a frame. Nothing else imports this.
"""

from .local import LocalEngine, LocalSidecar
from .tables import compared, stored_rows
from .token_view import TokenView

__all__ = ["LocalEngine", "LocalSidecar", "TokenView", "compared", "stored_rows"]
