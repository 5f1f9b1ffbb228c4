"""`jspec generate`: text as it comes, then a summary line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from jspec.cli import options
from jspec.errors import JspecError
from jspec.serve.generate import Generation, Piece, generate
from jspec.serve.metrics import Metrics
from jspec.text.prompts import read_text
from jspec.types import Logprobs
from jspec.weights.base import DTYPES


def bias(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """``ID:BIAS`` options as a dict."""
    try:
        return {int(token): float(value) for token, value in (one.split(":") for one in values)}
    except ValueError:
        raise click.BadParameter(f"{values!r}: write TOKEN_ID:BIAS, for instance 42:-5") from None


@click.command("generate")
@options.target
@click.option("--prompt", help="The prompt.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 file.")
@click.option("--raw", is_flag=True, help="No chat template: continue the prompt as it is.")
@options.draft
@click.option("--num-speculative-tokens", default=4, show_default=True, metavar="K", help="Drafts a round.")
@options.trees
@click.option("--max-new-tokens", default=256, show_default=True, metavar="N")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@options.kernels
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", *DTYPES]))
@options.sampling
@click.option("--logit-bias", multiple=True, metavar="ID:BIAS", callback=bias, help="May be repeated.")
@click.option("--seed", type=int, help="The same seed writes the same text; default: a fresh one.")
@options.verifier
@click.option("--logprobs", is_flag=True, help="Add the log-probability of each token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    prompt: str | None,
    prompt_file: Path | None,
    as_json: bool,
    draft: str | None,
    num_speculative_tokens: int,
    **settings: Any,
) -> None:
    """Write what follows a prompt: greedily, or drawn from exactly the target's distribution.

    The text goes to stdout; the line of counts and times, at the end, to stderr.
    """
    if prompt is not None and prompt_file is None:
        text = prompt
    elif prompt is None and prompt_file is not None:
        text = read_text(prompt_file)
    else:
        raise click.UsageError("give either --prompt or --prompt-file")

    def show(piece: Piece) -> None:
        if not as_json:
            click.echo(piece.text, nl=False)

    config = options.draft_config(settings, draft, num_speculative_tokens)
    if config.simulated_acceptance:
        click.echo(options.WARNING, err=True)
    result = generate(text, draft=config, on_piece=show, **settings)
    if as_json:
        simulated = {"simulated": True} if config.simulated_acceptance else {}
        click.echo(json.dumps(simulated | to_dict(result)))
    else:
        click.echo()
        click.echo(summary_line(result.metrics), err=True)
        if result.logprobs:
            click.echo("\n".join(logprob_lines(result.tokens, result.logprobs)), err=True)
    if result.finish_reason == "error":
        raise JspecError("the target's logits became NaN or infinite: the text ends before them")


def logprob_lines(tokens: list[int], logprobs: Logprobs) -> list[str]:
    """One line a token: its id, its log-probability under the settings, and under the model alone."""
    rows = zip(tokens, *logprobs, strict=True)
    return ["  token  processed        raw", *(f"{t:7d} {p:10.4f} {r:10.4f}" for t, p, r in rows)]


def to_dict(result: Generation) -> dict[str, Any]:
    """The JSON form of an answer."""
    answer = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "metrics": result.metrics.to_dict(),
    }
    return answer | ({"logprobs": result.logprobs._asdict()} if result.logprobs else {})


def summary_line(metrics: Metrics) -> str:
    """What the generation cost, on one line; and a second one where speculation hardly helped."""
    parts = [
        f"{metrics.num_tokens} tokens in {metrics.num_target_passes} target passes",
        f"accept length {metrics.accept_length:.2f} (bonus counted)",
    ]
    rate = metrics.acceptance_rate
    if rate is not None:
        places = " ".join(f"{share:.0%}" for share in metrics.acceptance_per_position if share is not None)
        drafts = f"{metrics.num_accepted_tokens}/{metrics.num_draft_tokens}"
        parts += [f"acceptance {rate:.0%} ({drafts} drafts; by position {places})"]
    if metrics.tokens_per_second is not None:
        parts += [f"{metrics.tokens_per_second:.1f} tokens/s"]
    seconds = metrics.seconds
    if seconds is not None and seconds.rest is not None:
        halves = {"draft": seconds.draft, "verify": seconds.verify, "rest": seconds.rest}
        split = ", ".join(f"{name} {(part or 0.0) / seconds.decode:.0%}" for name, part in halves.items())
        before = f"before it prefill {seconds.prefill:.2f} s, compile {seconds.compile:.1f} s"
        parts += [f"time {seconds.decode:.2f} s: {split}; {before}"]
    line = " | ".join(parts)
    return line if rate is None or rate >= 0.5 else f"{line}\n{advice(metrics)}"


def advice(metrics: Metrics) -> str:
    """What an acceptance rate under one half means and what to try."""
    return (
        f"Only {metrics.acceptance_rate:.0%} of the drafts were accepted: the text is the same, but each "
        "refused draft made a pass dearer. Try a smaller --num-speculative-tokens, another --draft, or "
        "--draft none; n-gram drafts pay where the answer repeats the prompt or itself (edits, "
        "summaries, code)."
    )
