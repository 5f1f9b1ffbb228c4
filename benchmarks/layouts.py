"""Which layout of the weights is fastest, and for how many rows: ``python benchmarks/layouts.py``.

Products of SmolLM2-135M's shapes in float32, each kind in a program of its own: a chain of
as many matrices as make up 150 MB, so that all of them come from memory as in a decoder,
not from a cache. Microseconds for one layer's matrices, and GB/s, for each height. The
programs run in turn; a figure is the least over the turns, a quiet machine's, with the
median behind it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, MLP, QUERY, KV, VOCAB = 576, 1536, 576, 192, 49152
SHAPES: dict[str, list[tuple[int, int]]] = {
    "q, k, v": [(WIDTH, QUERY), (WIDTH, KV), (WIDTH, KV)],
    "q, k, v as one": [(WIDTH, QUERY + 2 * KV)],
    "o": [(QUERY, WIDTH)],
    "gate, up": [(WIDTH, MLP), (WIDTH, MLP)],
    "gate, up as one": [(WIDTH, 2 * MLP)],
    "down": [(MLP, WIDTH)],
    "head": [(WIDTH, VOCAB)],
}
BYTES = 150e6


def program(shapes: list[tuple[int, int]], rows: int, transposed: bool, size: float = BYTES):
    """A function that runs the chain, how many layers it has, and their bytes."""
    layer = 4 * sum(a * b for a, b in shapes)
    count = max(1, round(size / layer))
    draw = np.random.default_rng(0).standard_normal

    def matrix(shape: tuple[int, int]) -> jax.Array:
        return jnp.asarray(draw(shape[::-1] if transposed else shape, dtype=np.float32))

    weights = [[matrix(shape) for shape in shapes] for _ in range(count)]
    x = jnp.ones((rows, shapes[0][0]))

    @jax.jit
    def chain(x, weights):
        for ws in weights:
            formula = "td,fd->tf" if transposed else "td,df->tf"
            products = [jnp.einsum(formula, x, w) for w in ws]
            products = jax.lax.optimization_barrier(products)  # all of a product is wanted
            x = x + 1e-9 * products[0][:, :1]  # and the next one waits for it
        return x

    return lambda: jax.block_until_ready(chain(x, weights)), count, layer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rows", default="1,2,5,9")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, jax {jax.__version__}\n")
    heights = [int(t) for t in options.rows.split(",")]
    print(
        f"| matrices | layout | {' | '.join(f'{t} rows' for t in heights)} |\n|{'---|' * (2 + len(heights))}"
    )
    for name, shapes in SHAPES.items():
        cells: dict[bool, list[str]] = {False: [], True: []}
        for rows in heights:
            programs = {way: program(shapes, rows, way) for way in cells}
            times: dict[bool, list[float]] = {way: [] for way in cells}
            for _ in range(options.turns + 1):
                for way, (run, _, _) in programs.items():
                    began = time.perf_counter()
                    run()
                    times[way].append(time.perf_counter() - began)
            for way, (_, count, size) in programs.items():
                least, middle = min(times[way][1:]) / count, statistics.median(times[way][1:]) / count
                cells[way].append(f"{least * 1e6:.0f} ({middle * 1e6:.0f}), {size / least / 1e9:.0f} GB/s")
        for way, row in cells.items():
            print(f"| {name} | {'[out, in]' if way else '[in, out]'} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
