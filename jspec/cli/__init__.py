"""The `jspec` command. Every user's mistake is one line on stderr and a non-zero exit code."""

from __future__ import annotations

import os
import sys

import click
import jax

from jspec.cli import bench, certify, convert, demo, generate
from jspec.errors import JspecError
from jspec.weights.smollm2 import cache_folder


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jspec")
def cli() -> None:
    """Speculative decoding in JAX: the target's own text, in fewer passes."""


for module in (generate, demo, bench, certify, convert):
    cli.add_command(module.command)


def main() -> None:
    """Run the command; compiled programs are kept for the next call."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    try:
        sys.exit(cli.main(prog_name="jspec", standalone_mode=False))  # what `Context.exit` was given
    except click.ClickException as mistake:
        mistake.show()
        sys.exit(mistake.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except JspecError as mistake:
        click.echo(f"jspec: {mistake}", err=True)
        sys.exit(1)
