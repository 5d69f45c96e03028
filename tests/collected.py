"""What a user can meet, collected from the code: options, exit codes, variables, metrics, keys."""

from __future__ import annotations

import ast
import re
import signal
from functools import cache
from typing import Any

import typer
from shared import REPO

import cli

PACKAGES = ("capture_kernels", "pipeline", "discovery", "sidecar")


@cache
def product() -> list[tuple[str, ast.Module, str]]:
    """Path, tree and source of every module that is installed."""
    paths = [REPO / "cli.py", *(p for name in PACKAGES for p in (REPO / name).rglob("*.py"))]
    sources = [(str(path.relative_to(REPO)), path.read_text(encoding="utf-8")) for path in paths]
    return [(path, ast.parse(source), source) for path, source in sources]


def integers(tree: ast.Module) -> dict[str, tuple[int, int]]:
    """The integer constants of a module: value and line, by name."""
    return {
        name_of(target): (statement.value.value, statement.lineno)
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, int)
        for target in getattr(statement, "targets", None) or [statement.target]
    }


def exit_codes(tree: ast.Module, source: str) -> set[int]:
    """The exit codes that a module gives: to Exit, to what is called `exit_code`, by signals as
    `128 + signal.SIGINT`, and as constants whose comment says that they are one."""
    known, lines = integers(tree), source.splitlines()
    given: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in ("Exit", "exit", "SystemExit"):
            given += [*node.args, *(word.value for word in node.keywords)]
        if isinstance(node, ast.Assign) and [name_of(t) for t in node.targets] == ["exit_code"]:
            given.append(node.value)
        if isinstance(node, ast.keyword) and node.arg == "exit_code":
            given.append(node.value)
        if isinstance(node, ast.arguments):
            pairs = zip(node.args[::-1], node.defaults[::-1], strict=False)
            given += [default for argument, default in pairs if argument.arg == "exit_code"]
        if isinstance(node, ast.BinOp) and ast.unparse(node).startswith("128 + signal.SIG"):
            given.append(ast.Constant(128 + getattr(signal, name_of(node.right))))
    found = {node.value for node in given if isinstance(node, ast.Constant)}
    found |= {
        known[node.id][0] for node in given if isinstance(node, ast.Name) and node.id in known
    }
    for value, line in known.values():
        above = []
        while lines[line - 2].startswith("#"):
            line -= 1
            above.append(lines[line - 1])
        if "exit code" in " ".join(above).lower():
            found.add(value)
    return {code for code in found if isinstance(code, int)}


def name_of(node: ast.AST) -> str:
    """`a.b.c` -> c."""
    return getattr(node, "attr", getattr(node, "id", ""))


def environment_variables(tree: ast.Module) -> set[str]:
    """The environment variables that a module reads or sets; for one that is not named by a
    constant, the expression."""
    named: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and name_of(node.value) == "environ":
            named.append(node.slice)
        if isinstance(node, ast.Compare) and name_of(node.comparators[0]) == "environ":
            named.append(node.left)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            owner = getattr(node.func, "value", None)
            if name_of(node.func) in ("getenv", "putenv") or name_of(owner) == "environ":
                named += node.args[:1]
            named += [word.value for word in node.keywords if word.arg == "envvar"]
    return {n.value if isinstance(n, ast.Constant) else ast.unparse(n) for n in named}


def metrics(tree: ast.Module) -> set[str]:
    """The Prometheus metrics that a module exports under a constant name, by prometheus_client or
    as text."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prometheus_client")
        for alias in node.names
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            whole = ast.unparse(node.func)
            if whole in imported or whole.startswith("prometheus_client."):
                name = getattr(node.args[0], "value", None)
                found |= {name} if isinstance(name, str) else set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^# (?:TYPE|HELP) (\w+)", node.value, flags=re.MULTILINE))
    return found


def keys_of_dict_with(key: str) -> set[str]:
    """The keys, those of nested ones too, of the dictionary in the code that has this key."""
    found: set[str] = set()
    for _, tree, _ in product():
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and key in {getattr(k, "value", None) for k in node.keys}:
                inside = (n for n in ast.walk(node) if isinstance(n, ast.Dict))
                keys = (k.value for n in inside for k in n.keys if isinstance(k, ast.Constant))
                found |= {str(k) for k in keys}
    assert found, f"no dictionary of the product has the key {key!r}"
    return found


@cache
def commands() -> dict[str, Any]:
    """The commands of `attn` by what is typed, as `attn db prune`; groups are left out."""
    found, todo = {}, [("attn", typer.main.get_command(cli.app))]
    while todo:
        name, command = todo.pop()
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = command
        else:
            todo += [(f"{name} {word}", one) for word, one in inner.items()]
    return found


def options(command: Any) -> dict[tuple[str, ...], Any]:
    """The options of a command, each by all of its names."""
    return {
        tuple(p.opts): p for p in command.params
        if p.param_type_name == "option" and "--help" not in p.opts
    }  # fmt: skip


def all_options() -> set[str]:
    """Every option of attn and of the repository's scripts, also those of its batch job, and those
    of pytest that pages name."""
    scripts = [p for top in ("benchmarks", "examples") for p in (REPO / top).rglob("*.py")]
    found = {name for c in commands().values() for names in options(c) for name in names}
    for script in scripts:
        found |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', script.read_text(encoding="utf-8")))
    batch = (REPO / "deploy/slurm/attn-nightly.sbatch").read_text(encoding="utf-8")
    found |= set(re.findall(r"^#SBATCH (--[a-z-]+)", batch, flags=re.MULTILINE))
    return found | {"--help", "--hypothesis-profile"}
