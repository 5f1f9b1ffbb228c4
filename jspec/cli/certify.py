"""`jspec certify`: is this target, with this draft, on this machine, lossless?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from jspec.certify import Certificate, Greedy, certify
from jspec.cli import options
from jspec.cli.demo import TOURS
from jspec.errors import positive
from jspec.sampling.verifiers import VERIFIERS
from jspec.serve.target import load
from jspec.text.prompts import read_prompts


@click.command("certify")
@options.target
@options.draft
@options.trees
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines or text; default: the demo's.")
@click.option("--num-prompts", default=8, show_default=True)
@click.option("--num-speculative-tokens", default=4, show_default=True, metavar="K")
@click.option("--max-new-tokens", default=64, show_default=True)
@options.kernels
@click.option("--dtype", default="auto", show_default=True)
@click.option(
    "--verifier",
    "verifiers",
    multiple=True,
    type=click.Choice(list(VERIFIERS)),
    help="May be repeated; default: all that can judge this draft.",
)
@click.option("--tolerance", type=float, help="Logit gap of a tie flip; default: by the dtype.")
@click.option("--rows", default=4000, show_default=True, help="Texts of each setting in the χ² tests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def command(
    context: click.Context,
    target: str,
    draft: str | None,
    num_speculative_tokens: int,
    prompts: Path | None,
    num_prompts: int,
    dtype: str,
    kernels: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Check that drafts change nothing: greedy text, exact distribution, χ² of the loop.

    Exit code 1 if anything is a fault. Tie flips, where rounding decides between two
    equally good tokens, are reported and are none.
    """
    for name in ("num_prompts", "max_new_tokens", "rows"):
        positive(name, num_prompts if name == "num_prompts" else settings[name])
    texts = read_prompts(prompts, num_prompts) if prompts else [text for _, text in TOURS][:num_prompts]
    config = options.draft_config(settings, draft, num_speculative_tokens)
    loaded = load(target, dtype, kernels)
    with Console(stderr=True).status("loading") as status:
        found = certify(loaded, config, texts, progress=status.update, **settings)
    if as_json:
        click.echo(json.dumps({"target": target, "draft": config.source, **found.to_dict()}))
    else:
        click.echo("\n".join(lines(found)))
    if found.faults:
        context.exit(1)


def lines(found: Certificate) -> list[str]:
    """The certificate for a terminal."""
    result = [f"on {found.where['device']} ({found.where['backend']}), {found.where['dtype']}"]
    for greedy in found.greedy:
        result += greedy_lines(greedy)
    for exact in found.exact:
        result.append(
            f"exact distribution   {exact.verifier}, {exact.drafts}: {exact.policies} settings, "
            f"largest error {exact.error:.1e}"
        )
    for chi in found.loop:
        rate = "no drafts" if chi.acceptance_rate is None else f"{chi.acceptance_rate:.0%} of drafts accepted"
        result.append(
            f"loop, χ²    {chi.verifier}: {len(chi.p_values)} settings x {chi.rows} texts, {rate}, "
            f"smallest p-value {min(chi.p_values):.2g}"
        )
    if any(chi.verifier == "coupled" for chi in found.loop):
        result.append(f"coupled     {found.coupled} texts differ from the plain ones")
    result += [f"FAULT: {fault}" for fault in found.faults] or ["certified: no fault found"]
    return result


def greedy_lines(greedy: Greedy) -> list[str]:
    head = "same shape " if greedy.same_shape else "greedy     "
    flips = len(greedy.differences) - greedy.faults
    bits = " bit for bit" if greedy.same_shape else ""
    counts = f"{greedy.prompts} prompts, {greedy.tokens} tokens equal{bits}, accept length "
    counts += f"{greedy.accept_length:.2f}, {flips} tie flips, {greedy.faults} faults"
    return [
        f"{head} {counts}",
        *(
            f"            prompt {d.prompt}, token {d.position}: {d.plain} against {d.drafted}, "
            f"top-2 margin {d.margin:.2g}: {d.verdict}"
            for d in greedy.differences
        ),
    ]
