"""`jspec demo`: the two-minute tour, tokens coloured by who wrote them."""

from __future__ import annotations

import click
from rich.console import Console
from rich.text import Text

from jspec.cli.generate import summary_line
from jspec.serve.generate import Piece, generate
from jspec.serve.target import Target, load

DRAFTED, BY_TARGET = "bold green", "default"
CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""
FOREST = (
    "The Amazon rainforest is the largest tropical rainforest in the world. It covers more than five million "
    "square kilometers across nine countries. It is home to about ten percent of all species on Earth. "
    "Scientists beleive that many of its plants and animals have not been discovered yet."
)
TOURS = (
    (
        "A correction: nearly all of the answer stands in the question",
        f"Correct the spelling, and repeat the whole text:\n\n{FOREST}",
    ),
    ("Code: parts of it", f"Rename the class Stack to Pile in this code:\n\n```python\n{CODE}```"),
    ("Free prose: little to copy, so most rounds draft nothing", "Why is the sky blue?"),
)


@click.command("demo")
@click.option("--target", default="smollm2", show_default=True, metavar="smollm2|FOLDER|FILE.gguf")
@click.option("--max-new-tokens", default=160, show_default=True, metavar="N")
def command(target: str, max_new_tokens: int) -> None:
    """Watch a real model write with n-gram drafts, and compare with plain decoding."""
    console = Console(highlight=False)
    console.print(f"Loading {target} ...")
    loaded = load(target)
    console.print(
        Text.assemble(
            ("Green", DRAFTED), " tokens were guessed by the draft and verified; the others the target wrote."
        )
    )
    for title, prompt in TOURS:
        console.rule(title)
        console.print(prompt, style="dim", markup=False)
        console.rule(style="dim")
        show(console, loaded, prompt, max_new_tokens)


def show(console: Console, target: Target, prompt: str, max_new_tokens: int) -> None:
    """One prompt, decoded with drafts in colour and then plainly."""

    def colour(piece: Piece) -> None:
        console.print(Text(piece.text, style=DRAFTED if piece.drafted else BY_TARGET), end="", soft_wrap=True)

    with_drafts = generate(prompt, target=target, max_new_tokens=max_new_tokens, on_piece=colour)
    console.print("\n")
    console.print(f"n-gram: {summary_line(with_drafts.metrics)}", style="cyan", markup=False)
    plain = generate(
        prompt, target=target, draft="none", max_new_tokens=max_new_tokens, on_piece=lambda piece: None
    )
    console.print(f"plain:  {summary_line(plain.metrics)}", style="cyan", markup=False)
    fast, slow = with_drafts.metrics.tokens_per_second, plain.metrics.tokens_per_second
    same = "the same text" if with_drafts.tokens == plain.tokens else "A DIFFERENT TEXT"
    ratio = f", {fast / slow:.2f} x the speed" if fast and slow else ""
    passes = f"{plain.metrics.num_target_passes} passes -> {with_drafts.metrics.num_target_passes}"
    console.print(f"{same}, {passes}{ratio}", style="bold")
