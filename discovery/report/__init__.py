"""report.html: a run on one page that needs nothing but a browser (DESIGN.md section 6)."""

from .page import report_html

__all__ = ["report_html"]
