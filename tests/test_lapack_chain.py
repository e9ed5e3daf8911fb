"""No two LAPACK calls of one program may run at once: on a CPU with few cores they can hang (see math/lowrank.py).

Every jaxpr, inner ones included, is searched for equations that hold a Cholesky factor or a triangular solve; each must
depend on the one before it. Deterministic; two solves side by side fail it.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
import small
from jax import lax
from jax.extend import core

from geode_jax._runtime.jax_settings import jax_settings
from geode_jax.forest import fill
from geode_jax.gibbs import missing
from geode_jax.math.row_space import observe_in_space
from geode_jax.math.whitening import SharedNoise, observe_rows
from geode_jax.predict import class_span, conditional_moments, mixture, nodes

LAPACK = {"cholesky", "triangular_solve"}


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


def test_no_product_is_rounded_to_ten_bits(arguments):
    """A GPU multiplies float32 matrices with 10-bit mantissas unless told otherwise (HIGHEST)."""
    nodes_of, draws, seen = arguments
    summary = functools.partial(
        conditional_moments.conditional_summary, num_candidates=3, levels=(0.05, 0.95), num_wanted=6
    )
    programs = (
        (summary, (nodes_of, draws, None, seen)),
        (functools.partial(mixture.log_density_partial, num_candidates=3), arguments),
        (nodes.Ranking.of, (arguments[0].dictionary,)),
    )
    for program, given in programs:
        text = str(jax.make_jaxpr(program)(*given))
        assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 0


@pytest.fixture(params=["isotropic", "shaped", "ranked", "space"])
def arguments(posterior, request, monkeypatch):
    """Nodes, draws and rows: isotropic noise, that of a covariance, nodes ranked by one direction, nodes in a space."""
    if request.param == "ranked":
        for module in (mixture, nodes):
            monkeypatch.setattr(module, "SCREEN_RANK", 1)
        jax.clear_caches()  # what was traced with the package's own
    with jax_settings(posterior.dtype):
        x, identity = jnp.zeros((4, 6), posterior.dtype), jnp.eye(6, dtype=posterior.dtype)
        noise = SharedNoise.of(identity) if request.param in ("shaped", "ranked") else None
        seen = observe_rows(x, jnp.ones_like(x), noise, num_seen=6)
        if request.param == "space":
            seen = observe_in_space(x, jnp.ones_like(x), identity[:, :5], num_seen=6)
        found = nodes.Nodes(posterior.dictionary, None)
        if noise is not None:
            found = nodes.Nodes.of(posterior.dictionary, identity)
        assert (found.ranking is not None) == (request.param == "ranked")
        yield found, jax.tree.map(jnp.asarray, posterior.thin(4)), seen
    if request.param == "ranked":
        jax.clear_caches()


def test_what_is_seen_is_one_chain():
    program = functools.partial(observe_rows, num_seen=5)
    noise = SharedNoise.of(jnp.eye(6))
    count, pairs = unordered_pairs(jax.make_jaxpr(program)(jnp.zeros((4, 6)), jnp.ones((4, 6)), noise).jaxpr)
    assert count == 2
    assert not pairs
    jaxpr = jax.make_jaxpr(lambda *rest: observe_in_space(*rest, num_seen=6))(
        jnp.zeros((4, 6)), jnp.ones((4, 6)), jnp.eye(6)[:, :5]
    )
    count, pairs = unordered_pairs(jaxpr.jaxpr)
    assert count == 3
    assert not pairs


def test_predictions_are_one_chain(arguments):
    found, draws, seen = arguments
    dtype = seen.mask.dtype
    summary, sample = conditional_moments.conditional_summary, conditional_moments.conditional_draws
    given: dict = {
        "density": (mixture.log_density_partial, (seen,), {}),
        "mean": (summary, (None, seen), {"levels": None, "num_wanted": 6}),
        "interval": (summary, (jnp.asarray([1]), seen), {"levels": (0.05, 0.95), "num_wanted": 1}),
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
    for name, jaxpr in jaxprs.items():
        count, pairs = unordered_pairs(jaxpr.jaxpr)
        assert count >= 4, name
        assert not pairs, name


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
