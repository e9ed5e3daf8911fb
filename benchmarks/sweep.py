"""How far a sweep is from its floor: reading the squared coordinates of all rows at all nodes once.

The floor is a plain sum over that array, timed in the same run. Beside it every block of the sweep alone, and what a
sweep takes as it is run: compiled as a scan over many. Synthetic statistics of rows that are near one path of the tree.

python -m benchmarks.sweep [--quick] [--sizes N,DEPTH,D ...]
"""

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import best_seconds, write_result
from benchmarks.tables import load
from geode_jax._runtime.compilation import quickly_compiled
from geode_jax._typing import Array
from geode_jax.gibbs import membership, noise, rank, shrinkage, signal, tree_weights
from geode_jax.gibbs.chain import Chain, draw_of, initial_chain, rank_uniforms, step, without_rows
from geode_jax.gibbs.packing import packed, unpacked
from geode_jax.gibbs.sweep import node_uniforms
from geode_jax.model.borrowed import Borrowed
from geode_jax.model.problem import Problem
from geode_jax.model.state import node_sums
from geode_jax.model.statistics import Statistics
from geode_jax.model.tree import tree_from_mask
from geode_jax.settings import DirectMembership, ExactShrinkage, Prior, RankAdaptation

NUM_FEATURES = 100
SIZES = ((6000, 5, 20), (20_000, 6, 40), (60_000, 5, 20))


def synthetic_problem(num_rows: int, depth: int, max_rank: int) -> Problem:
    """Statistics of rows each of which is near the nodes of one path."""
    rng = np.random.default_rng(0)
    num_nodes = 2 ** (depth + 1) - 1
    residual = rng.gamma(50.0, 2.0, (num_nodes, num_rows)).astype(np.float32)
    node = rng.integers(0, 2**depth, num_rows) + 2**depth - 1
    for _ in range(depth + 1):
        residual[node, np.arange(num_rows)] *= 0.5
        node = (node - 1) // 2
    squared = np.square(rng.standard_normal((num_nodes, num_rows, max_rank), dtype=np.float32))
    tree = tree_from_mask(np.ones(num_nodes, bool))
    return Problem(
        tree=tree,
        statistics=Statistics(jnp.asarray(residual), jnp.asarray(squared), jnp.asarray(num_rows, jnp.int32)),
        partial=None,
        borrowed=Borrowed.nothing(tree, max_rank, jnp.float32),
        is_available=jnp.ones((num_nodes, max_rank), bool),
        num_features=jnp.asarray(float(NUM_FEATURES)),
        prior=Prior(),
        shrinkage=ExactShrinkage(),
        membership=DirectMembership(),
    )


def blocks() -> dict[str, Callable[[Array, Chain, Problem], Any]]:
    """Every block as a function of (key, chain, problem), and the floor."""
    adaptation = RankAdaptation()

    def sums(key: Array, chain: Chain, problem: Problem) -> Any:
        node = (chain.state.node + jax.random.randint(key, (), 0, 2)) % problem.tree.num_nodes
        return node_sums(eqx.tree_at(lambda it: it.node, chain.state, node), problem.statistics)

    def ranks(key: Array, chain: Chain, problem: Problem) -> Any:
        uniforms = rank_uniforms(key, chain.state)
        return rank.adapt(uniforms, chain.state, problem.is_available, jnp.asarray(100), adaptation)[:2]

    def kept(key: Array, chain: Chain, problem: Problem) -> Any:
        draw = draw_of(key, chain, problem)
        return draw.log_joint, draw.dimension

    return {
        "floor": lambda key, chain, problem: jnp.sum(problem.statistics.squared * chain.state.tau_excess[0, 0]),
        "membership": lambda key, chain, problem: membership.draw(
            key, chain.state, problem.statistics, problem.tree, problem.num_features
        ),
        "node sums": sums,
        "u": lambda key, chain, problem: signal.move(
            node_uniforms(key, chain.state), chain.state, chain.sums, problem.tree, problem.shrinkage
        ),
        "tau": lambda key, chain, problem: shrinkage.move(node_uniforms(key, chain.state), chain.state, problem.prior),
        "tail": lambda key, chain, problem: shrinkage.renew(
            node_uniforms(key, chain.state), chain.state, chain.sums, problem.tree, problem.prior
        ),
        "sigma": lambda key, chain, problem: noise.move(
            node_uniforms(key, chain.state), chain.state, chain.sums, problem
        ),
        "weights": lambda key, chain, problem: tree_weights.move(
            node_uniforms(key, chain.state), chain.state, chain.sums, problem.tree, problem.prior
        ),
        "ranks": ranks,
        "what is kept": kept,
    }


def in_a_loop(
    block: Callable[[Array, Chain, Problem], Any], chain: Chain, problem: Problem, repeats: int
) -> Callable[[], Any]:
    """A compiled loop of as many calls."""

    @jax.jit
    def loop(chain: Chain, problem: Problem) -> Any:
        def again(last: Any, index: Array) -> tuple[Any, None]:
            # the parameters hang on what the last round found, or the compiler would take the work out of the loop;
            # what is found is kept as it is in a sweep: a sum over it would be fused into the work
            hook = sum(jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(last)) * 1e-30
            state = jax.tree.map(
                lambda leaf: leaf + hook if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, chain.state
            )
            return block(jax.random.key(index), eqx.tree_at(lambda it: it.state, chain, state), problem), None

        like = jax.eval_shape(block, jax.random.key(0), chain, problem)
        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return jax.lax.scan(again, start, jnp.arange(repeats, dtype=jnp.uint32))[0]

    return lambda: loop(chain, problem)


def whole_sweeps(chain: Chain, problem: Problem, repeats: int) -> Callable[[], Any]:
    """As many whole steps of the chain, compiled as they are where they are run."""

    @quickly_compiled
    def run(chain: Chain, problem: Problem) -> tuple[Chain, Any]:
        def again(chain: Chain, index: Array) -> tuple[Chain, Any]:
            chain = step(jax.random.key(index), problem, jnp.asarray(10**6), RankAdaptation(), chain, index)
            return chain, packed(without_rows(chain), chain.state.log_sigma2.dtype)

        index = jnp.arange(repeats)
        chain, rows = jax.lax.scan(again, chain, index)
        kept = unpacked(rows, jax.eval_shape(without_rows, chain))
        return chain, jax.vmap(draw_of, in_axes=(0, 0, None))(jax.vmap(jax.random.key)(index), kept, problem)

    return lambda: run(chain, problem)


def measure(
    num_rows: int, depth: int, max_rank: int, parts: dict[str, Callable[..., Any]], repeats: int
) -> dict[str, Any]:
    """Milliseconds of each of the `parts` of a sweep, one of them the floor, and of whole sweeps; their ratio."""
    problem = synthetic_problem(num_rows, depth, max_rank)
    chain = jax.jit(initial_chain)(jax.random.key(0), problem)
    for index in range(30):  # to where a chain usually is
        chain = jax.jit(step, static_argnums=3)(
            jax.random.key(index), problem, jnp.asarray(10**6), RankAdaptation(), chain, jnp.asarray(index)
        )
    runs = {name: in_a_loop(part, chain, problem, repeats) for name, part in parts.items()}
    runs["sweep"] = whole_sweeps(chain, problem, repeats)
    found = {name: best_seconds(run) / repeats for name, run in runs.items()}
    for name in 2 * ("floor", "sweep"):  # in turn, as other work slows the machine for seconds at a time
        found[name] = min(found[name], best_seconds(runs[name]) / repeats)
    num_nodes = 2 ** (depth + 1) - 1
    row: dict[str, Any] = {"rows": num_rows, "nodes": num_nodes, "rank": max_rank}
    row |= {f"{name} ms": round(1000 * value, 3) for name, value in found.items()}
    ratio = round(found["sweep"] / found["floor"], 2)
    bandwidth = round(4e-9 * num_rows * num_nodes * max_rank / found["floor"], 1)
    return {**row, "ratio": ratio, "gigabytes per second": bandwidth}


def tables() -> list[str]:
    record = load("sweep")
    rows = record["rows"]
    columns = [name for name in rows[0] if name.endswith(" ms")]
    lines = [
        "### A sweep against its floor",
        "",
        "The floor is a plain sum by XLA that reads the squared coordinates once (float32, one tree, one chain;"
        " milliseconds):",
        "",
        f"| rows x nodes x rank | {' | '.join(name.removesuffix(' ms') for name in columns)} | sweep over floor |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for row in rows:
        values = " | ".join(f"{row[name]:.2f}" for name in columns)
        lines.append(f"| {row['rows']} x {row['nodes']} x {row['rank']} | {values} | **{row['ratio']:.2f}** |")
    return lines


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that everything works")
    parser.add_argument("--sizes", nargs="+", help="rows,depth,rank of each problem")
    options = parser.parse_args(arguments)
    sizes = [tuple(map(int, text.split(","))) for text in options.sizes or []] or list(SIZES)
    rows = []
    for size in [(200, 1, 3)] if options.quick else sizes:
        rows.append(measure(*size, blocks(), 5 if options.quick else 50))
        print(rows[-1], flush=True)
    if not options.quick:
        write_result("sweep", {"features": NUM_FEATURES}, rows)
    return rows


if __name__ == "__main__":
    main()
