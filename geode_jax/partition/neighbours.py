"""The k-nearest-neighbour graph that METIS cuts."""

import numpy as np
from scipy import sparse
from sklearn.neighbors import NearestNeighbors

# scikit-learn's exact search: 20,000 rows of 784 features take 6 s on 2 cores and the cost grows as n^2 D, while
# pynndescent pays about 45 s of numba compilation once per process and then grows almost linearly: they take equally
# long near 40,000 rows. In few dimensions a k-d tree is exact and cheap at any n.
EXACT_MAX_ROWS = 40_000
EXACT_MAX_FEATURES = 8


def uses_exact_search(num_rows: int, num_features: int) -> bool:
    """Whether the graph is exact for data of this shape."""
    return num_rows <= EXACT_MAX_ROWS or num_features <= EXACT_MAX_FEATURES


def nearest_neighbours(x: np.ndarray, num_neighbors: int, seed: int) -> np.ndarray:
    """Indices of the nearest other rows, (n, num_neighbors); -1 where the approximate search found fewer."""
    n, num_features = x.shape
    if not uses_exact_search(n, num_features):
        # Imported here: numba's import and compilation cost is paid only where the approximate search is used.
        from pynndescent import NNDescent

        index = NNDescent(x, n_neighbors=num_neighbors + 1, random_state=seed)
        neighbours = index.neighbor_graph[0]
    else:
        search = NearestNeighbors(n_neighbors=min(num_neighbors + 1, n)).fit(x)
        neighbours = search.kneighbors(x, return_distance=False)
    # A row is usually its own first neighbour, but not where it has duplicates: drop the row itself wherever it
    # appears, else its farthest neighbour.
    is_self = neighbours == np.arange(n)[:, None]
    is_self[~is_self.any(axis=1), -1] = True
    return neighbours[~is_self].reshape(n, -1)


def neighbour_graph(x: np.ndarray, num_neighbors: int, seed: int) -> sparse.csr_array:
    """Symmetric graph of the rows with integer weights: 2 for mutual neighbours, 1 for one-sided ones."""
    n = x.shape[0]
    neighbours = nearest_neighbours(x, min(num_neighbors, n - 1), seed)
    rows = np.repeat(np.arange(n), neighbours.shape[1])
    columns = neighbours.ravel()
    found = columns >= 0
    ones = np.ones(int(found.sum()), dtype=np.int32)
    directed = sparse.csr_array((ones, (rows[found], columns[found])), shape=(n, n))
    graph = sparse.csr_array(directed + directed.T)
    graph.sort_indices()
    return graph
