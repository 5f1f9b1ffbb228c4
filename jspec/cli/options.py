"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from jspec.sampling.drafters import BY_NAME, DraftConfig
from jspec.sampling.drafters.config import TREES
from jspec.sampling.policy import SETTINGS
from jspec.sampling.verifiers import VERIFIERS


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


def draft_config(settings: dict[str, Any], draft: str | None, num_speculative_tokens: int = 4) -> DraftConfig:
    """Take the options of `trees` out of a command's settings."""
    names = ("tree", "tree_size", "tree_depth", "tree_topk", "simulated_acceptance")
    return DraftConfig(draft, num_speculative_tokens, **{name: settings.pop(name) for name in names})


def draft(function: Callable) -> Callable:
    """``--draft``."""
    named = "|".join(BY_NAME)
    return click.option(
        "--draft",
        metavar=f"{named}|self:LAYERS|FOLDER",
        help="What guesses: nothing, a drafter without weights (default: ngram, the text so far), the "
        "target's first layers, another model, or a draft head (EAGLE, Medusa).",
    )(function)


def verifier(function: Callable) -> Callable:
    """``--verifier``."""
    return click.option(
        "--verifier",
        default="token",
        show_default=True,
        type=click.Choice([name for name, one in VERIFIERS.items() if not one.greedy_only]),
        help="coupled: the same text whatever the draft. typical_lossy: Medusa's, another distribution.",
    )(function)


def sampling(function: Callable) -> Callable:
    """One option for each of `jspec.sampling.policy.SETTINGS`; temperature is 0 by default."""
    for name, setting in reversed(SETTINGS.items()):
        default = 0.0 if name == "temperature" else setting.neutral
        option = click.option(
            f"--{name.replace('_', '-')}", default=default, show_default=True, help=setting.help
        )
        function = option(function)
    return function


WARNING = "SIMULATED ACCEPTANCE: drafts are kept by chance. This is for timing; the text is not real."
