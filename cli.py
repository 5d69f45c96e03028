"""The `attn` command: thin. A command imports its heavy libraries when it runs."""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from capture_kernels.errors import AttnError
from discovery.commands.classify import classify
from discovery.commands.discover import discover
from discovery.commands.runs import app as runs_app
from pipeline.capture_command import capture
from pipeline.examples.command import examples_app
from pipeline.serve_command import ANYTHING, serve
from pipeline.standard_streams import OutputLostError, open_standard_streams
from pipeline.store.commands import db_app
from pipeline.stream.commands import stream_app
from pipeline.stream.send_command import send
from sidecar.command import sidecar
from sidecar.explore.command import explore
from sidecar.watch.drift_command import command as drift

# Typer shows only the child of the class that it raises for words it cannot parse.
UsageError: Any = typer.BadParameter.__mro__[1]


class UserErrors(TyperGroup):
    """Turns an AttnError into one line on stderr and its exit code."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal or pipe of any encoding
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except AttnError as error:
            notes = getattr(error, "__notes__", ())
            print(f"{error.heading}: {error}", *notes, sep="\n", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except UsageError as error:
            raise as_one_line(error) from None

    def make_context(self, *given: Any, **named: Any) -> Any:
        try:
            return super().make_context(*given, **named)
        except UsageError as error:
            raise as_one_line(error) from None


def as_one_line(error: Any) -> Exception:
    """The exit of a command that cannot be parsed, which is said on stderr; the error itself where
    it is a group's without a command, which shows its help."""
    if not error.format_message():
        return error
    command = getattr(error, "ctx", None)
    where = command.command_path if command else "attn"
    print(f"error: {error.format_message()} (see {where} --help)", file=sys.stderr)
    return typer.Exit(2)


class PlainHelp(TyperCommand):
    """Help without a table, which 80 columns have no room for where options have long names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=UserErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"attn {version('attn')}")
        raise typer.Exit


@app.callback()
def attn(
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=show_version, help="Show the version."),
    ] = False,
) -> None:
    """Capture, cluster and classify what language models attend to."""


app.command()(capture)
app.command(cls=PlainHelp, context_settings=ANYTHING)(serve)
app.command()(discover)
app.command()(classify)
app.command()(sidecar)
app.command()(explore)
app.command()(send)
app.command("drift")(drift)
app.add_typer(runs_app, name="runs")
app.add_typer(db_app, name="db")
app.add_typer(stream_app, name="stream")
app.add_typer(examples_app, name="examples")


def main(arguments: list[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    open_standard_streams()
    code: Any = 0
    try:
        try:
            app(arguments, prog_name="attn")
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except OutputLostError as lost:
        if lost.exit_code:
            print(f"error: {lost}", file=sys.stderr)
        code = code or lost.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
