"""`jspec bench`: what speculation brings on this machine, and where the rest of the time goes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import jax
from rich import box
from rich.console import Console
from rich.table import Table

from jspec.bench.measure import bench
from jspec.cli import options
from jspec.errors import JspecError, optional, positive
from jspec.sampling.drafters.config import DraftConfig
from jspec.serve.target import load
from jspec.text.prompts import read_prompts


def numbers(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    """``2,4,8`` as numbers."""
    try:
        return [positive("K", int(one)) for one in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r}: write whole numbers with commas, for instance 2,4,8") from None


@click.command("bench")
@options.target
@click.option("--draft", metavar="DRAFT,DRAFT", help="As in generate; default: ngram.")
@options.trees
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSON lines, or a text.")
@click.option("--num-prompts", default=8, show_default=True)
@click.option("--num-speculative-tokens", default="4", show_default=True, metavar="K,K", callback=numbers)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--batch", default=1, show_default=True, help="Rows: copies of a prompt, seeds of their own.")
@click.option("--repeats", default=3, show_default=True)
@options.verifier
@options.kernels
@click.option("--dtype", default="auto", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the report here.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the speed-ups into this PNG.")
def command(
    target: str,
    draft: str | None,
    prompts: Path,
    num_prompts: int,
    num_speculative_tokens: list[int],
    dtype: str,
    kernels: str,
    json_file: Path | None,
    plot: Path | None,
    **settings: Any,
) -> None:
    """Time drafters against plain decoding, interleaved in one process.

    Loop efficiency is the measured speed-up over the one that the model passes alone
    predict: what is missing to 1 is neither target nor draft.
    """
    for name in ("max_new_tokens", "batch", "repeats"):
        positive(name, settings[name])
    texts = read_prompts(prompts, positive("num_prompts", num_prompts))
    loaded = load(target, dtype, kernels)
    base = options.draft_config(settings, None)
    drafts = draft.split(",") if draft else [None if base.simulated_acceptance else "ngram"]
    configs = list(dict.fromkeys(_config(base, d, k) for d in drafts for k in num_speculative_tokens))
    if base.simulated_acceptance:
        click.echo(options.WARNING, err=True)
    console = Console(stderr=True)
    with console.status("compiling") as status:
        results = bench(loaded, configs, texts, progress=status.update, **settings)
    report = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "target": target,
        "dtype": loaded.dtype,
        "prompts": len(texts),
        **settings,
        "results": [result.to_dict() for result in results],
    }
    Console().print(table(report))
    if json_file:
        write(json_file, lambda path: path.write_text(json.dumps(report, indent=2) + "\n"))
    if plot:
        write(plot, lambda path: draw(report, path))


def _config(base: DraftConfig, draft: str | None, k: int) -> DraftConfig:
    """One setting: trees are for heads only, and K is for chains only."""
    if draft is None or (base.tree in ("static", "dynamic") and Path(draft).exists()):
        return dataclasses.replace(base, draft=draft)
    if Path(draft).exists():
        return dataclasses.replace(base, draft=draft, num_speculative_tokens=k)
    return DraftConfig(draft, k, simulated_acceptance=base.simulated_acceptance)


def table(report: dict[str, Any]) -> Table:
    """The report for a terminal of 80 columns."""
    title = " | ".join(str(report[key]) for key in ("target", "dtype", "device"))
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for head in ("", "tok/s", "x plain", "spread", "length", "r_K+1", "draft", "pred.", "eff."):
        shown.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row in report["results"]:
        low, _, high = row["ratio_of_pairs"]
        shown.add_row(
            row["name"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio_to_plain']:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{row['accept_length_bonus_counted']:.2f}",
            f"{row['cost_of_k_plus_1_rows']:.2f}",
            f"{row['draft_cost_a_round']:.2f}",
            f"{row['predicted_speed_up']:.2f}",
            f"{row['loop_efficiency']:.2f}",
        )
    shown.caption = (
        "spread: of single prompts | length: tokens a target pass, bonus counted | r_K+1: cost of a pass "
        "of K + 1 rows, draft: of a round of drafting, in one-row passes | pred.: speed-up if passes were "
        "all | eff.: measured / pred."
    )
    return shown


def write(path: Path, save: Any) -> None:
    """Save beside and rename, so that a failure leaves no half-written file."""
    temporary = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        save(temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise JspecError(f"cannot write {path}: {error.strerror}") from None


def draw(report: dict[str, Any], path: Path) -> None:
    """Measured beside predicted speed-up, one pair of bars a setting."""
    optional("matplotlib", "plot")
    from matplotlib.figure import Figure

    rows = [row for row in report["results"] if row["draft"] != "none"]
    names = [row["name"].replace(" K=", "\nK=") for row in rows]
    figure = Figure(figsize=(2 + 1.2 * len(rows), 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [r["ratio_to_plain"] for r in rows], 0.4, label="measured")
    axes.bar([p + 0.2 for p in places], [r["predicted_speed_up"] for r in rows], 0.4, label="predicted")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(list(places), names)
    axes.set_ylabel("tokens/s over plain decoding")
    axes.set_title(f"{report['target']}, {report['dtype']}, {report['device']}")
    axes.legend()
    figure.savefig(path, dpi=120)
