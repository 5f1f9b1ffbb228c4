"""What `test_sharded.py` checks, as a program: it needs eight devices from its start.

``python -m tests.sharding.sharded_checks [name...]`` runs the named checks, or all, and prints
a line of JSON: the fault of each, or null.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import install_import_hook

with install_import_hook("jspec", "beartype.beartype"):
    from jspec.errors import JspecError
    from jspec.pallas.verify import reference
    from jspec.sampling import keys, policy, truncate, verifiers, walk
    from jspec.sharding import row_stats, verify
    from jspec.types import Policy
from tests.pallas import new_setting
from tests.pallas import verify_cases as cases
from tests.pallas.test_verify import same
from tests.sharding import collectives

SHARDS, NODES, WIDTH = 8, 6, 40
VOCAB = SHARDS * WIDTH
BIG = 12 * VOCAB  # of programs that are only compiled: a row of logits is wider than a histogram
LIKELY = jnp.array([5, 3 * WIDTH + 5, VOCAB - 1])  # of several shards, two at one place in theirs
LIMIT = 64 * 1024  # bytes of a collective's result for each sequence of at most 8 rows
STEPS = 6
VERIFIERS = {
    verifier.name: verifier
    for verifier in (verifiers.greedy, verifiers.token, verifiers.block, verifiers.coupled)
}
row_stats.PIECE = 12  # several a shard, the last two overlapping


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")[-len(shape) :])


def put(x, *axes):
    return jax.device_put(
        x, NamedSharding(mesh_of(2, 4) if "data" in axes else mesh_of(8), PartitionSpec(*axes))
    )


def sliced(function):
    """A function of a slice, settings and slices of rows, on the mesh."""
    spec = PartitionSpec(None, None, "model")

    def local(rows, x):
        part = row_stats.Slice("model", SHARDS, jax.lax.axis_index("model") * x.shape[-1], x.shape[-1])
        return function(part, rows, x)

    where = (PartitionSpec(), spec)
    return jax.jit(jax.shard_map(local, mesh=mesh_of(8), in_specs=where, out_specs=PartitionSpec()))


@functools.cache
def program(verifier: str, tree_of: bool, drawn: bool, data: bool = False, plain: bool = False):
    """A compiled round, called like ``decide`` without its ends."""
    decide = walk.decide if plain else verify.make(mesh_of(2, 4) if data else mesh_of(8), "model")
    given = round_of(0, tree_of, drawn)
    given = given if plain else spread(given, data)
    return jax.jit(functools.partial(decide, VERIFIERS[verifier], depth=NODES - 1)).lower(*given).compile()


def round_of(seed: int, tree_of: bool, drawn: bool, *, add=0.0, **more):
    proposal = cases.proposal(seed, NODES, VOCAB, tree_of=tree_of, drawn=drawn)
    x = cases.logits(seed, NODES, VOCAB).at[:, :, LIKELY].add(9) + add
    if seed % 2:
        x = jnp.round(4 * x) / 4  # ties
    logq = None
    if drawn:
        logq = jax.nn.log_softmax(proposal.logq.at[:, :, LIKELY].add(8.0))
    proposal = proposal._replace(tokens=LIKELY[proposal.tokens], logq=logq)
    rows, history = cases.settings(VOCAB, **more), cases.history(VOCAB)
    history = history._replace(tokens=history.tokens.at[:, 1:3].set(LIKELY[:2]))
    return rows, history, cases.row_keys(seed), jnp.arange(cases.BATCH) + seed, proposal, x


def spread(given, data: bool):
    """The round's arrays on the mesh."""
    batch = "data" if data else None
    rows, history, key, position, proposal, x = given
    everywhere = lambda tree: jax.tree.map(lambda part: put(part, batch), tree)  # noqa: E731
    logq = None if proposal.logq is None else put(proposal.logq, batch, None, "model")
    proposal = everywhere(proposal._replace(logq=None))._replace(logq=logq)
    return *everywhere((rows, history, key, position)), proposal, put(x, batch, None, "model")


def compare(verifier: str, tree_of: bool, drawn: bool, *, data: bool = False, seeds=range(4), **more) -> None:
    plain, ours = program(verifier, tree_of, drawn, plain=True), program(verifier, tree_of, drawn, data)
    accepted = 0
    for seed in seeds:
        given = round_of(seed, tree_of, drawn, **more)
        expected, got = plain(*given), ours(*spread(given, data))
        same(expected, got)
        for part in jax.tree.leaves(got):  # every device has the same verdict
            for piece in part.addressable_shards:
                np.testing.assert_array_equal(np.asarray(part)[piece.index], piece.data)
        accepted += int(got.accepted.sum())
    assert accepted > 4


def all_row_stats(dtype) -> None:
    settings = dict(
        temperature=[0.0, 1.0, 0.7, 1.3, 1.0, 0.9, 1.0, 0.01, 1e-6, 1.0, 30.0, 1.0],
        top_k=[0, 0, 5, 0, 7, 0, 1, 3, 9, 10**6, 40, 2],
        top_p=[1.0, 1.0, 1.0, 0.8, 0.9, 1.0, 0.999, 1e-6, 0.5, 1.0, 0.7, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.9],
    )
    batch = len(settings["top_k"])
    find = sliced(lambda part, rows, x: row_stats.stats_and_entries(part, rows, x)[0])
    for seed, grid in ((0, 0.0), (1, 0.5)):
        x = 4 * jax.random.normal(jax.random.key(seed), (batch, 3, VOCAB))
        x = (jnp.round(x / grid) * grid if grid else x).astype(dtype)
        x = x.at[:, 1, ::3].set(-jnp.inf).at[1, 1, 170].set(jnp.nan).at[2, 1, 9].set(jnp.inf)
        x = x.at[3, 1].set(-jnp.inf).at[4, 1].set(-2.5).at[6, 1].set(-0.0).at[6, 1, ::2].set(0.0)
        for used in (
            settings,
            settings | {"top_p": 1.0},
            settings | {"top_k": 0},
            {"min_p": settings["min_p"]},
        ):
            rows = policy.make(batch, VOCAB, **used)
            check_row_stats(rows, x, find(rows, put(x, None, None, "model")))


def check_row_stats(rows: Policy, x, got: reference.RowStats) -> None:
    expected = jax.jit(reference.row_stats_ref)(rows, x)
    np.testing.assert_array_equal(got.top, expected.top)
    np.testing.assert_array_equal(got.best, expected.best)
    good = np.isfinite(np.asarray(expected.top))
    np.testing.assert_array_equal(np.isfinite(got.log_total), good)
    np.testing.assert_allclose(got.log_total, expected.log_total, rtol=1e-5, atol=1e-5)
    # Without top-p the cut is exact (all are kept at -inf as at the least logit).
    x = x.astype(jnp.float32)
    kept, expected_kept = (np.asarray(x >= stats.cut[..., None]) for stats in (got, expected))
    exact = np.asarray(rows.top_p == 1)
    counted = exact & np.asarray(rows.top_k > 0)
    np.testing.assert_array_equal(kept[exact][good[exact]], expected_kept[exact][good[exact]])
    np.testing.assert_array_equal(
        np.asarray(got.cut)[counted][good[counted]], np.asarray(expected.cut)[counted][good[counted]]
    )
    # With it both sides of the cut weigh the same up to rounding.
    top = jnp.where(good, expected.top, 0)[..., None]
    weight = np.asarray(jnp.exp(truncate.scale(rows, jnp.minimum(x, top), top)))
    differ = np.where(kept != expected_kept, weight, 0).sum(-1) / np.where(good, weight.sum(-1), 1)
    assert differ[good].max() < 1e-5, differ


def check_row_stats_float32():
    all_row_stats(jnp.float32)


def check_row_stats_bfloat16():
    all_row_stats(jnp.bfloat16)


def check_noise():
    key = cases.row_keys(3)[0]
    local = sliced(
        lambda part, rows, x: jax.lax.psum(
            jnp.zeros(VOCAB).at[part.first + jnp.arange(WIDTH)].set(verify._noise(part, key)), "model"
        )
    )
    got = local(0.0, put(jnp.zeros((1, 1, VOCAB)), None, None, "model"))
    np.testing.assert_array_equal(got, keys.gumbel(keys.wrap(key), VOCAB))


def check_greedy_chain():
    compare("greedy", tree_of=False, drawn=False)


def check_token_tree():
    compare("token", tree_of=True, drawn=False)


def check_token_drawn_chain():
    compare("token", tree_of=False, drawn=True)


def check_coupled_tree():
    compare("coupled", tree_of=True, drawn=False)


def check_block_drawn_chain():
    compare("block", tree_of=False, drawn=True)


def check_a_batch_sharded_too():
    compare("token", tree_of=True, drawn=False, data=True)


def check_adjusted():
    more = dict(logit_bias={VOCAB - 1: 2.0, 3: 4.0}, repetition_penalty=1.05, presence_penalty=0.2)
    more |= dict(frequency_penalty=0.1, min_new_tokens=9)
    compare("token", tree_of=True, drawn=False, **more)
    compare("token", tree_of=False, drawn=True, **more)


def check_bad_rows():
    """NaN, +inf and rows of -inf alone end the walk; -inf in whole shards is a distribution."""
    bad = np.zeros((cases.BATCH, NODES, VOCAB), np.float32)
    bad[0, 1, 190], bad[1, 0, 2], bad[2, 2], bad[3, :, WIDTH : 3 * WIDTH] = np.nan, np.inf, -np.inf, -np.inf
    compare("token", tree_of=True, drawn=False, add=bad)
    compare("token", tree_of=False, drawn=True, add=bad)
    got = program("token", True, False)(*spread(round_of(0, True, False, add=bad), False))
    assert not got.ok[1]
    assert bool(jnp.all(got.ok[3:]))


def foreign_ids(verifier: str, tree_of: bool, drawn: bool) -> None:
    """Drafts that are no tokens are absent: the verdicts of plain code on a draft without them."""
    plain, ours = program(verifier, tree_of, drawn, plain=True), program(verifier, tree_of, drawn)
    accepted = 0
    for seed in range(4):
        # An index beyond the row is taken for its last token, a likely one.
        before, (proposal, x) = round_of(seed, tree_of, drawn)[:4], round_of(seed, tree_of, drawn)[4:]
        given, meant = cases.with_foreign_ids(proposal, seed, VOCAB)
        expected, got = plain(*before, meant, x), ours(*spread((*before, given, x), False))
        same(expected, got)
        assert bool(jnp.all((got.tokens >= 0) & (got.tokens < VOCAB)))
        assert got.accepted[0] == 0
        accepted += int(got.accepted.sum())
    assert accepted > 2


def check_foreign_ids_in_a_tree():
    foreign_ids("token", True, False)


def check_foreign_ids():
    foreign_ids("token", False, True)
    foreign_ids("block", False, True)
    foreign_ids("coupled", True, False)
    foreign_ids("greedy", False, False)


def new_setting_of(after: bool) -> None:
    """A sampling step that no shard can apply to its slice: plain code where a row uses it."""
    with pytest.MonkeyPatch.context() as patch:
        new_setting.install(patch, after)
        plain, ours = (
            jax.jit(functools.partial(decide, verifiers.token, depth=NODES - 1))
            for decide in (walk.decide, verify.make(mesh_of(8), "model"))
        )
        for seed in range(2):
            rows, *rest = round_of(seed, True, False)
            for highest_id in ([100, -1, 100, 100, -1, 100], [-1] * cases.BATCH):
                given = new_setting.extended(rows, jnp.array(highest_id)), *rest
                same(plain(*given), ours(*spread(given, False)))


def check_a_new_step_behind_the_temperature():
    new_setting_of(after=True)


def check_a_new_step_before_the_temperature():
    new_setting_of(after=False)


def without_a_distribution(verifier: str) -> None:
    given = round_of(2, False, True)
    logq = given[4].logq.at[:, 2, 100].set(jnp.inf).at[:, 3, :].set(-jnp.inf)
    given = (*given[:4], given[4]._replace(logq=logq), given[5])
    same(
        program(verifier, False, True, plain=True)(*given),
        program(verifier, False, True)(*spread(given, False)),
    )


def check_drafts_without_a_distribution():
    without_a_distribution("token")


def check_drafts_without_a_distribution_in_a_block():
    without_a_distribution("block")


def faults(text: str) -> list[str]:
    """What a program exchanges that it should not: in too many steps, too much at once, whole rows."""
    found = collectives.collectives(text)
    assert found, "no collectives: the text was not understood"
    chain = collectives.longest_chain(text)
    result = [f"{chain} collectives wait for each other"] if chain > STEPS else []
    result += [f"{one.opcode} {one.shape}" for one in found if one.size > LIMIT * cases.BATCH]
    return result + [f"{one.opcode} {one.shape}" for one in found if str(BIG) in one.shape]


def exchange(decide, verifier: str, tree_of: bool, drawn: bool) -> str:
    """The compiled text of a round with a greater vocabulary."""

    def enlarged(part):
        shape = [BIG if size == VOCAB else size for size in part.shape]
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=part.sharding)

    given = jax.tree.map(enlarged, spread(round_of(0, tree_of, drawn), False))
    return (
        jax.jit(functools.partial(decide, VERIFIERS[verifier], depth=NODES - 1))
        .lower(*given)
        .compile()
        .as_text()
    )


def check_exchange(*given) -> None:
    text = exchange(verify.make(mesh_of(8), "model"), *given)
    assert not faults(text), (given, faults(text))
    assert collectives.longest_chain(text) == STEPS  # the parser misses none


def check_exchange_of_a_tree():
    check_exchange("token", True, False)


def check_exchange_of_the_block_verifier():
    check_exchange("block", False, True)


def check_exchange_of_the_coupled_verifier():
    check_exchange("coupled", True, False)


def check_exchange_of_plain_code_is_refused():
    found = faults(exchange(walk.decide, "token", False, False))
    assert "wait for each other" in found[0], found


def check_a_bisection_is_refused():
    def bisect(part, rows, x):
        def step(_, bounds):
            low, high = bounds
            middle = (low + high) / 2
            count = jax.lax.psum(jnp.sum(x >= middle, axis=-1, keepdims=True), part.axis)
            enough = count >= truncate.each(rows.top_k)
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        top = row_stats.greatest(part, x)[..., None]
        return jax.lax.fori_loop(0, 32, step, (top - 100, top))[0]

    given = policy.make(6, VOCAB, top_k=5), put(cases.logits(0, NODES, VOCAB), None, None, "model")
    found = faults(sliced(bisect).lower(*given).compile().as_text())
    assert found[0].startswith("33 collectives"), found


def check_gathered_logits_are_refused():
    def gather(part, rows, x):
        whole = jnp.zeros((*x.shape[:2], SHARDS, part.width)).at[:, :, 0].set(x)
        return reference.row_stats_ref(rows, jax.lax.psum(whole, part.axis).reshape(*x.shape[:2], -1))

    given = policy.make(6, BIG, top_k=5), put(cases.logits(0, NODES, BIG), None, None, "model")
    assert faults(sliced(gather).lower(*given).compile().as_text())


def refused(function, words: str) -> None:
    try:
        function()
    except JspecError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was refused: {words}")


def check_refusals():
    mesh = mesh_of(8)
    refused(lambda: verify.make(mesh, "tensor"), "no axis 'tensor'")
    explicit = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Explicit,))
    refused(lambda: verify.make(explicit, "model"), "type Explicit")
    rows, history, key, position, proposal, x = round_of(0, True, True)
    decide = verify.make(mesh, "model")
    odd = rows, history, key, position, proposal, x[:, :, 1:]
    refused(lambda: decide(verifiers.token, *odd, depth=NODES - 1), f"{VOCAB - 1} ids does not divide")
    wide = jax.ShapeDtypeStruct((*x.shape[:2], 2**25), x.dtype)
    many = rows, history, key, position, proposal._replace(logq=None), wide
    refused(lambda: jax.eval_shape(lambda *a: decide(verifiers.token, *a, depth=5), *many), "too large")
    refused(lambda: decide(verifiers.block, *odd, depth=NODES - 1), "block")


def check_drawn_trees_go_by_plain_code():
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("jspec.sharding.verify")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    given = round_of(0, True, True)
    decide = functools.partial(verify.make(mesh_of(8), "model"), verifiers.token, depth=NODES - 1)
    jax.eval_shape(decide, *given)
    assert "plain code" in told[0]


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_") and name not in ("check_row_stats", "check_exchange")
}


def main() -> None:
    result = {}
    for name in sys.argv[1:] or CHECKS:
        start = time.process_time()
        try:
            CHECKS[name]()
            result[name] = None
        except Exception:
            result[name] = traceback.format_exc()
        print(
            name,
            "fails" if result[name] else "passes",
            f"{time.process_time() - start:.1f} s",
            file=sys.stderr,
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
