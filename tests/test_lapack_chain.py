"""No two LAPACK calls of one program may run at once: on a CPU with few cores they can hang (see math/lowrank.py).

Every jaxpr, inner ones included, is searched for equations that hold a Cholesky factor or a triangular solve; each must
depend on the one before it. Deterministic; two solves side by side fail it. So are programs that XLA has compiled: it
takes out loops of one round, and knows the best of a single node.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from conftest import DICTIONARY, SAMPLER
from jax import lax
from jax.extend import core

import geode_jax
from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import fill
from geode_jax.gibbs import missing
from geode_jax.math import lowrank
from geode_jax.math.rows_in_space import Space, observe_in_space
from geode_jax.math.whitening import SharedNoise, observe_rows
from geode_jax.predict import class_span, conditional_moments, mixture, nodes

LAPACK = {"cholesky", "triangular_solve"}
DEVIATION = np.array([3.0, 2.0, 0.5, 0.5, 0.5])


def _inner(equation):
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def unordered_pairs(jaxpr):
    """(how many LAPACK equations, pairs of neighbours without a dependence) in a jaxpr and those inside it."""
    ancestors: dict = {}
    holders, count, pairs = [], 0, []
    for equation in jaxpr.eqns:
        own = frozenset().union(*(ancestors.get(v, frozenset()) for v in equation.invars if isinstance(v, core.Var)))
        inner_count = int(equation.primitive.name in LAPACK)
        for inner in _inner(equation):
            found, inside = unordered_pairs(inner)
            inner_count += found
            pairs += inside
        if inner_count:
            pairs += [(str(before.primitive), str(equation.primitive)) for before in holders if id(before) not in own]
            holders.append(equation)
            own |= {id(equation)}
            count += inner_count
        for variable in equation.outvars:
            ancestors[variable] = own
    return count, pairs


def unordered_calls(text):
    """:func:`unordered_pairs` of a compiled program, from its text."""
    computations: dict = {}
    for line in text.splitlines():
        if begun := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            own = computations.setdefault(begun[1], [])
        elif found := re.match(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line):
            own.append(found.groups())

    def inside(instruction):
        called = re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", instruction)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", instruction):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        return called

    @functools.cache
    def number_in(name):
        return sum(number_of(instruction) for _, instruction in computations[name])

    def number_of(instruction):
        is_one = 'custom_call_target="lapack_' in instruction
        return is_one + sum(number_in(name) for name in inside(instruction) if name in computations)

    count, pairs = 0, []
    for instructions in computations.values():
        ancestors: dict = {}
        holders: list = []
        for name, instruction in instructions:
            before = re.findall(r"%([\w.\-]+)", instruction)
            own = frozenset().union(*(ancestors.get(one, frozenset()) for one in before))
            if number_of(instruction):
                pairs += [(one, name) for one in holders if one not in own]
                holders.append(name)
                own |= {name}
            ancestors[name] = own
        count += sum('custom_call_target="lapack_' in instruction for _, instruction in instructions)
    return count, pairs


@pytest.fixture(params=["isotropic", "shaped", "ranked", "space", "shaped space", "ranked space"])
def arguments(posterior, request, monkeypatch):
    """Nodes, draws and rows: isotropic noise, that of a covariance, nodes in a space.

    "shaped space" has a noise covariance there. Where "ranked", nodes are ranked by one direction, twice, and factors
    are inverted by blocks.
    """
    is_ranked = request.param.startswith("ranked")
    if is_ranked:
        for name in ("SCREEN_RANK", "FIRST_RANK", "KEPT_TIMES"):
            monkeypatch.setattr(nodes, name, 1)
        monkeypatch.setattr(nodes, "KEPT", 3)
        monkeypatch.setattr(lowrank, "LEAF", 1)
        assert len(nodes.rankings(posterior.dictionary.tree.num_nodes, posterior.dictionary.max_rank, 3)) == 2
        jax.clear_caches()  # what was traced with the package's own
    with jax_settings(posterior.dtype):
        x, identity = jnp.zeros((4, 6), posterior.dtype), jnp.eye(6, dtype=posterior.dtype)
        noise = SharedNoise.of(identity) if request.param in ("shaped", "ranked") else None
        seen = observe_rows(x, jnp.ones_like(x), noise, num_seen=6)
        if "space" in request.param:
            deviation = None if request.param == "space" else DEVIATION
            seen = observe_in_space(x, jnp.ones_like(x), Space.of(identity[:, :5], deviation), num_seen=6)
        if noise is not None:
            found = nodes.Nodes.of(posterior.dictionary, identity)
        else:
            ranking = nodes.Ranking.of(posterior.dictionary) if is_ranked else None
            found = nodes.Nodes(posterior.dictionary, ranking)
        assert (found.ranking is not None) == is_ranked
        yield found, jax.tree.map(jnp.asarray, posterior.thin(4)), seen
    if is_ranked:
        jax.clear_caches()


def test_what_is_seen_is_one_chain():
    program = functools.partial(observe_rows, num_seen=5)
    noise = SharedNoise.of(jnp.eye(6))
    count, pairs = unordered_pairs(jax.make_jaxpr(program)(jnp.zeros((4, 6)), jnp.ones((4, 6)), noise).jaxpr)
    assert count == 2
    assert not pairs
    for deviation, number in ((None, 3), (DEVIATION, 5)):
        space = Space.of(jnp.eye(6)[:, :5], deviation)
        jaxpr = jax.make_jaxpr(lambda *rest: observe_in_space(*rest, num_seen=6))(
            jnp.zeros((4, 6)), jnp.ones((4, 6)), space
        )
        count, pairs = unordered_pairs(jaxpr.jaxpr)
        assert count == number
        assert not pairs


def test_predictions_are_one_chain_of_exact_products(arguments):
    """And no product is rounded: a GPU multiplies float32 matrices with 10-bit mantissas unless told HIGHEST."""
    found, draws, seen = arguments
    dtype = seen.mask.dtype
    summary, sample = conditional_moments.conditional_summary, conditional_moments.conditional_draws
    ends = jnp.asarray(conditional_moments.tails((0.05, 0.95)), dtype)
    given: dict = {
        "density": (mixture.log_density_partial, (seen,), {}),
        "mean": (summary, (None, None, seen), {"num_wanted": 6}),
        "interval": (summary, (jnp.asarray([1]), ends, seen), {"num_wanted": 1}),
        "all intervals": (summary, (None, ends, seen), {"num_wanted": 6}),
        "draws": (sample, (None, seen, jnp.arange(4)), {"num_samples": 2, "num_wanted": 6}),
    }
    jaxprs = {}
    for name, (program, rest, options) in given.items():
        whole = (found, draws, *rest) if name != "draws" else (jax.random.key(0), found, draws, *rest)
        jaxprs[name] = jax.make_jaxpr(functools.partial(program, num_candidates=3, **options))(*whole)
    shown = class_span.Shown(*(jnp.zeros(shape, jnp.float32) for shape in ((4, 6), (4, 6, 6), (4, 6), (4,), (4,))))
    shown = jax.tree.map(lambda leaf: leaf.astype(dtype), shown)
    jaxprs["classes"] = jax.make_jaxpr(functools.partial(class_span.log_density_reduced, num_candidates=3))(
        found.dictionary, draws, jnp.ones((), dtype), shown
    )
    # not a multiple of those that are worked on at once
    more = jax.tree.map(lambda leaf: jnp.repeat(leaf, 5, axis=1), draws)
    jaxprs["density of 20 draws"] = jax.make_jaxpr(functools.partial(mixture.log_density_partial, num_candidates=3))(
        found, more, seen
    )
    jaxprs["classes of 20 draws"] = jax.make_jaxpr(functools.partial(class_span.log_density_reduced, num_candidates=3))(
        found.dictionary, more, jnp.ones((), dtype), shown
    )
    for name, jaxpr in jaxprs.items():
        count, pairs = unordered_pairs(jaxpr.jaxpr)
        assert count >= 4, name
        assert not pairs, name
    jaxprs["ranking"] = jax.make_jaxpr(nodes.Ranking.of)(found.dictionary)
    for name, jaxpr in jaxprs.items():
        text = str(jaxpr)
        assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 0, name


def _compiled(program, *given, **options):
    return jax.jit(functools.partial(program, **options)).lower(*given).compile().as_text()


def test_two_chains_side_by_side_are_seen():
    """Also where they are in loops, of which XLA takes out those of one round."""

    def solve(matrix):
        return lax.linalg.triangular_solve(jnp.linalg.cholesky(matrix), matrix, left_side=True, lower=True)

    matrices = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))
    assert unordered_calls(_compiled(solve, matrices)) == (2, [])
    assert unordered_calls(_compiled(lambda a: solve(a) + lax.map(solve, 2.0 * a[None])[0], matrices))[1]
    assert unordered_calls(_compiled(lambda a: solve(solve(a)), matrices)) == (4, [])


@pytest.fixture(scope="module")
def shallow(data):
    def fit(depth):
        dictionary = dataclasses.replace(DICTIONARY, depth=depth)
        return geode_jax.fit(jax.random.key(0), data, dictionary=dictionary, sampler=SAMPLER)

    return functools.cache(fit)


@pytest.mark.parametrize(
    ("depth", "program", "leaf"),
    [
        (2, "mean", lowrank.LEAF),
        *(
            pytest.param(*rest, lowrank.LEAF, marks=pytest.mark.slow)
            for rest in itertools.product((0, 2), ("density", "interval"))
        ),
        *(
            pytest.param(*rest, lowrank.LEAF, marks=pytest.mark.slow)
            for rest in ((0, "mean"), (0, "draws"), (2, "draws"))
        ),
        *(pytest.param(2, name, 1, marks=pytest.mark.slow) for name in ("mean", "draws")),
    ],
)
def test_compiled_predictions_are_one_chain(shallow, depth, program, leaf, monkeypatch):
    """Of trees of few nodes, whose products are made in a single round; also where factors are inverted by blocks."""
    posterior = shallow(depth)
    if leaf != lowrank.LEAF:
        monkeypatch.setattr(lowrank, "LEAF", leaf)
        jax.clear_caches()
    with jax_settings(posterior.dtype):
        dictionary, dtype = posterior.dictionary, posterior.dtype
        rows = jnp.zeros((4, posterior.num_features), dtype)
        seen = observe_rows(rows, jnp.ones_like(rows), None, num_seen=3)
        found, draws = nodes.Nodes(dictionary, None), jax.tree.map(jnp.asarray, posterior.thin(4))
        few = {"num_candidates": min(3, dictionary.tree.num_nodes)}
        summary, sample = conditional_moments.conditional_summary, conditional_moments.conditional_draws
        ends = jnp.asarray(conditional_moments.tails((0.05, 0.95)), dtype)
        text = {
            "mean": lambda: _compiled(summary, found, draws, None, None, seen, num_wanted=6, **few),
            "interval": lambda: _compiled(summary, found, draws, None, ends, seen, num_wanted=6, **few),
            "density": lambda: _compiled(mixture.log_density_partial, found, draws, seen, **few),
            "draws": lambda: _compiled(
                sample, jax.random.key(0), found, draws, None, seen, jnp.arange(4), num_samples=2, num_wanted=6, **few
            ),
        }[program]()
    if leaf != lowrank.LEAF:
        jax.clear_caches()
    count, pairs = unordered_calls(text)
    assert count >= 4 + 4 * (leaf == 1)
    assert not pairs


@pytest.mark.slow
def test_compiled_work_on_missing_features_is_one_chain():
    dictionary = small.make_dictionary(jnp.float32)
    state = small.draw_from_prior(jax.random.key(0), small.without_rows(dictionary), small.active_mask(dictionary), 6)
    rows = small.make_partial_rows(dictionary, jnp.zeros((6, 5)), num_groups=1)
    group = jax.tree.map(lambda leaf: leaf[0], rows)
    given = (jnp.zeros(shape) for shape in ((6, 5, 3), (6, 5), (6, 5), (6,), (6, 3)))
    for text in (
        _compiled(missing.draw_group, jax.random.key(0), state, group, dictionary.tree),
        _compiled(fill._conditional, rows, *given),
    ):
        count, pairs = unordered_calls(text)
        assert count >= 3
        assert not pairs


def test_the_sweep_is_one_chain_with_missing_features():
    dictionary = small.make_dictionary(jnp.float32)
    active = small.active_mask(dictionary)
    state = small.draw_from_prior(jax.random.key(0), small.without_rows(dictionary), active, 6)
    rows = small.make_partial_rows(dictionary, jnp.zeros((6, 5)), num_groups=1)
    group = jax.tree.map(lambda leaf: leaf[0], rows)
    jaxprs = [
        jax.make_jaxpr(missing.draw_group)(jax.random.key(0), state, group, dictionary.tree),
        jax.make_jaxpr(fill._conditional)(
            rows, *(jnp.zeros(shape) for shape in ((6, 5, 3), (6, 5), (6, 5), (6,), (6, 3)))
        ),
    ]
    for jaxpr in jaxprs:
        count, pairs = unordered_pairs(jaxpr.jaxpr)
        assert count >= 3
        assert not pairs


def test_the_check_sees_two_solves_side_by_side():
    def beside(a, b):
        factor = jnp.linalg.cholesky(a)
        return [lax.linalg.triangular_solve(factor, side, left_side=True, lower=True) for side in (b, 2 * b)]

    eye = jnp.eye(3)
    assert unordered_pairs(jax.make_jaxpr(beside)(eye, eye).jaxpr)[1] == [("triangular_solve", "triangular_solve")]
