"""The nested binary partition of the rows by METIS.

METIS balances whatever that cuts: components of 500 and 5500 rows are cut 3000 to 3000. So a cell whose graph is not
connected is split between components, and METIS cuts connected cells only, one call per cell. (One recursive call for
the whole tree takes 0.11 s against 0.18 s at 60,000 rows and depth 4, both far below the cost of the graph, but it cuts
through components: `python -m benchmarks.partition_calls` shows both.)
"""

from typing import NamedTuple

import numpy as np
import pymetis
from scipy import sparse
from scipy.sparse import csgraph

from geode_jax._runtime.threads import parallel_map
from geode_jax.partition.refinement import refined
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.products import Products
from geode_jax.rows.view import Rows


class TreeOptions(NamedTuple):
    """How a tree is grown: neighbours per row in the graph, scales below the root, and least rows per cell."""

    num_neighbors: int
    depth: int
    min_cell_size: int


class Partition(NamedTuple):
    """A complete binary tree in heap order: ``cells[k]`` are the rows of node k, ascending, None if k is absent.

    A present node has both children or none; the children's rows are a partition of the node's. Where the rows are
    divided among processes, cells have the rows of this one, and `sizes`, (K,), are the numbers of everyone's rows.
    """

    depth: int
    cells: tuple[np.ndarray | None, ...]
    processes: Processes = ALONE
    sizes: np.ndarray | None = None

    @classmethod
    def among(cls, processes: Processes, depth: int, cells: tuple[np.ndarray | None, ...]) -> "Partition":
        """The partition of everyone's rows, of which this process has those in `cells`."""
        sizes = np.array([0 if rows is None else rows.size for rows in cells])
        return cls(depth, cells, processes, processes.total(sizes))

    def cell(self, node: int) -> np.ndarray:
        """Rows of a present node."""
        rows = self.cells[node]
        if rows is None:
            raise ValueError(f"node {node} is absent")
        return rows

    @classmethod
    def of_leaves(cls, depth: int, place: np.ndarray, is_present: np.ndarray) -> "Partition":
        """The partition of these nodes, (K,), in which rows have these leaves, as in :meth:`leaf_order`."""
        scale = [(node + 1).bit_length() - 1 for node in range(is_present.size)]
        at = [np.flatnonzero(place >> (depth - own) == node + 1 - 2**own) for node, own in enumerate(scale)]
        return cls(depth, tuple(rows if here else None for rows, here in zip(at, is_present.tolist(), strict=True)))

    def divided(self, processes: Processes) -> "Partition":
        """The same partition, of all rows, with this process's rows in the cells."""
        if processes.is_alone:
            return self._replace(processes=processes)
        sizes = np.array([0 if rows is None else rows.size for rows in self.cells])
        cells = (None if rows is None else processes.own(rows) for rows in self.cells)
        return Partition(self.depth, tuple(cells), processes, sizes)

    def size(self, node: int) -> int:
        """Number of rows of a present node, those of other processes included."""
        return self.cell(node).size if self.sizes is None else int(self.sizes[node])

    @property
    def is_present(self) -> np.ndarray:
        """Mask of the nodes that exist, (K,)."""
        return np.array([cell is not None for cell in self.cells])

    def leaf_order(self) -> np.ndarray:
        """The position of every row's leaf, counted from left to right, (n,)."""
        place = np.zeros(self.cell(0).size, dtype=int)
        for node, rows in enumerate(self.cells):
            if rows is not None:  # children after their parents
                scale = (node + 1).bit_length() - 1
                place[rows] = (node + 1 - 2**scale) << (self.depth - scale)
        return place

    def nodes_at(self, scale: int) -> list[int]:
        """Nodes that partition the rows at `scale`: present nodes at that scale, and leaves above it."""
        last = 2 ** (scale + 1) - 1
        present = self.is_present
        return [k for k in range(last) if present[k] and (2 * k + 1 >= last or not present[2 * k + 1])]


def default_depth(num_rows: int, min_cell_size: int) -> int:
    """Scales below the root at which a balanced tree's cells reach `min_cell_size`, at most 7."""
    return int(np.clip(np.floor(np.log2(max(num_rows / min_cell_size, 1.0))), 0, 7))


def partition_rows(
    x: np.ndarray, graph: sparse.csr_array, depth: int, min_cell_size: int, seed: int, *, refines: bool = False
) -> Partition:
    """Split the rows of `x` (n, D) down to `depth`; a cell is a leaf if a child would be below `min_cell_size`.

    `refines`: after every cut of the graph, rows go over to the side whose normal describes them better.
    """
    cells: list[np.ndarray | None] = [None] * (2 ** (depth + 1) - 1)
    cells[0] = np.arange(x.shape[0])
    for node in range(2**depth - 1):
        rows = cells[node]
        if rows is None or rows.size < 2 * min_cell_size:
            continue
        is_right = _split(x, graph, rows, min_cell_size, seed + node)
        if refines:
            is_right = refined(x[rows], is_right, min_cell_size)
        if min_cell_size <= is_right.sum() <= rows.size - min_cell_size:
            cells[2 * node + 1], cells[2 * node + 2] = rows[~is_right], rows[is_right]
    return Partition(depth, tuple(cells))


def route_rows(
    x: Rows, sample: np.ndarray, partition: Partition, known: np.ndarray, min_cell_size: int, processes: Processes
) -> Partition:
    """Extend the partition of a `sample` (m, D) to all rows, of which this process's, `x` (n, D), are read once.

    `known`, (m,): the places of the sample among everyone's rows, ascending. These keep their cells; the others go to
    the child whose centre is nearer, from the root down. A cell is a leaf if a child would have fewer than
    `min_cell_size` rows.
    """
    depth = partition.depth
    path = _paths(x, sample, partition, processes.products)
    is_own = np.isin(known, processes.own(known) + processes.start)
    path[processes.own(known)] = partition.leaf_order()[is_own]
    at_leaf = processes.total(np.bincount(path, minlength=2**depth))
    sizes = np.concatenate([at_leaf.reshape(2**scale, -1).sum(axis=1) for scale in range(depth + 1)])
    cells: list[np.ndarray | None] = [None] * len(partition.cells)
    cells[0] = np.arange(x.shape[0])
    for node in range(2**depth - 1):
        rows, children = cells[node], [2 * node + 1, 2 * node + 2]
        if rows is None or partition.cells[children[0]] is None:
            continue
        if sizes[children].min() >= min_cell_size:
            further = depth - (node + 1).bit_length()  # turns after this one
            is_right = (path[rows] >> further) & 1 == 1
            cells[children[0]], cells[children[1]] = rows[~is_right], rows[is_right]
    return Partition(depth, tuple(cells), processes, sizes)


def _paths(x: Rows, sample: np.ndarray, partition: Partition, products: Products) -> np.ndarray:
    """The position of every row's leaf, as in `leaf_order`, (n,): its bits are the turns from the root down."""
    present = partition.is_present
    splits = np.array([node for node in range(2**partition.depth - 1) if present[2 * node + 1]], dtype=int)
    column = np.full(present.size, splits.size)  # the last one where there is no split: rows stay left
    column[splits] = np.arange(splits.size)

    def centres(nodes: np.ndarray) -> np.ndarray:
        means = [sample[partition.cell(node)].mean(axis=0, dtype=np.float64) for node in nodes.tolist()]
        return np.reshape(means, (nodes.size, x.shape[1]))

    left, right = centres(2 * splits + 1), centres(2 * splits + 2)
    toward = (right - left).astype(x.dtype)
    middle = (toward * (0.5 * (left + right))).sum(axis=1)
    path = np.zeros(x.shape[0], dtype=int)

    def route(some: slice) -> None:
        is_right = np.pad(products.product(x[some], toward.T) > middle, [(0, 0), (0, 1)])
        own, row = path[some], np.arange(is_right.shape[0])
        for scale in range(partition.depth):
            own[:] = 2 * own + is_right[row, column[2**scale - 1 + own]]

    parallel_map(route, products.blocks(x.shape[0], x.shape[1] + splits.size))
    return path


def _split(x: np.ndarray, graph: sparse.csr_array, rows: np.ndarray, min_cell_size: int, seed: int) -> np.ndarray:
    """Mask of the rows that go right, (rows.size,); all rows may be on one side."""
    part = graph[rows][:, rows]
    num_components, component = csgraph.connected_components(part, directed=False)
    if num_components > 1:
        is_right = _split_components(x[rows], component, num_components)
        if min_cell_size <= is_right.sum() <= rows.size - min_cell_size:
            return is_right
    adjacency = pymetis.CSRAdjacency(part.indptr.astype(np.int64), part.indices.astype(np.int64))
    _, labels = pymetis.part_graph(
        2,
        adjacency=adjacency,
        eweights=part.data.tolist(),
        recursive=True,
        options=pymetis.Options(seed=seed % 2**31),
    )
    return np.asarray(labels) == 1


def _split_components(x: np.ndarray, component: np.ndarray, num_components: int) -> np.ndarray:
    """Split whole components into two sets, keeping near ones together, with sizes as even as that allows.

    The components' centres are put in order along their first principal direction (weighted by size), and the order
    is cut where the sizes are most even.
    """
    sizes = np.bincount(component, minlength=num_components)
    indicator = sparse.csr_array(
        (np.ones(component.size), (component, np.arange(component.size))),
        shape=(num_components, component.size),
    )
    centres = (indicator @ x) / sizes[:, None]
    centres = (centres - centres.mean(axis=0)) * np.sqrt(sizes)[:, None]
    direction = np.linalg.svd(centres, full_matrices=False)[2][0]
    order = np.argsort(centres @ direction / np.sqrt(sizes), kind="stable")
    left_sizes = np.cumsum(sizes[order])[:-1]
    cut = int(np.argmin(np.abs(left_sizes - component.size / 2))) + 1
    goes_right = np.zeros(num_components, dtype=bool)
    goes_right[order[cut:]] = True
    return goes_right[component]
