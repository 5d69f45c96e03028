"""report.html: a run on one page that needs nothing but a browser (DESIGN.md section 6).

May import `discovery.artifacts` and `discovery.describe`.
"""
