"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from jspec.drafts import TREES


def target(function: Callable) -> Callable:
    """``--target``."""
    metavar = "smollm2|FOLDER|FILE.gguf"
    return click.option("--target", default="smollm2", show_default=True, metavar=metavar)(function)


def kernels(function: Callable) -> Callable:
    """``--kernels``."""
    return click.option(
        "--kernels",
        type=click.Choice(["auto", "plain"]),
        default="auto",
        show_default=True,
        help="auto: those made for the first device, if there are any; plain: none.",
    )(function)


def chances(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """``.8,.7,.6`` as chances."""
    try:
        return tuple(float(one) for one in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r}: write chances with commas, for instance .8,.7,.6") from None


def trees(function: Callable) -> Callable:
    """How a head's drafts grow, and acceptance that is simulated."""
    options: list[Any] = [
        click.option(
            "--tree",
            type=click.Choice(TREES),
            help="How a head's drafts grow; default: chain for EAGLE, static for Medusa.",
        ),
        click.option(
            "--tree-size", type=int, metavar="N", help="Drafted nodes of a tree, the root not counted."
        ),
        click.option("--tree-depth", type=int, metavar="N", help="Levels of a tree."),
        click.option("--tree-topk", type=int, metavar="N", help="Children of a node, at most."),
        click.option(
            "--simulated-acceptance",
            default="",
            metavar="P,P,...",
            callback=chances,
            help="Instead of a draft, for timing: keep drafts with these chances. NOT REAL TEXT.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


WARNING = "SIMULATED ACCEPTANCE: drafts are kept by chance. This is for timing; the text is not real."
