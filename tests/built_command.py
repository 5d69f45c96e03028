"""The tree of `attn` commands, built once in each process: typer builds all of it at each call, in
40 ms. It keeps nothing of a call but the names of the option for help, which are other ones where a
command is parsed by itself.

Imported by conftest.py, and by the server of processes.py before its forks.
"""

from __future__ import annotations

from functools import cache

import typer.main

typer.main.get_command = cache(typer.main.get_command)

import cli  # noqa: E402

typer.main.get_command(cli.app)
