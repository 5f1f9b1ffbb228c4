"""`jspec convert`: a model in another form."""

from __future__ import annotations

import click

from jspec.weights.base import DTYPES
from jspec.weights.convert import FORMS, Converted, convert


@click.command("convert")
@click.argument("source", metavar="smollm2|FOLDER|FILE.gguf")
@click.argument("dest", metavar="DEST")
@click.option("--to", default="orbax", show_default=True, type=click.Choice(FORMS))
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", *DTYPES]),
    help="auto: the one that all tensors are stored in, else float32.",
)
def command(source: str, dest: str, to: str, dtype: str) -> None:
    """Write a model as an Orbax or a Hugging Face folder.

    DEST is a new folder, which the other commands take as --target and --draft. The
    tokenizer's files are copied.
    """
    click.echo(summary(convert(source, dest, to, dtype)))


def summary(done: Converted) -> str:
    """What was written and how large it is, on one line."""
    files = ", ".join(done.copied) or "no tokenizer: there was none beside the weights"
    return (
        f"{done.folder}: {done.form}, {done.dtype}, {done.parameters:,} parameters, "
        f"{done.size / 1e6:,.1f} MB; {files}"
    )
