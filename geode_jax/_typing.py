"""Array types and the axis glossary used in every annotation of the package.

====  =======================================================================
axis  meaning
====  =======================================================================
n     rows (observations)
D     features (columns)
V     features that vary, which the model describes
K     nodes of the tree in heap order, ``2**(depth + 1) - 1``; absent nodes are masked
d     directions kept per node (``max_rank``)
S     scales of the tree, ``depth + 1``; the root is scale 0
F     trees of the forest
C     chains per tree
T     draws
M     candidate nodes of a row
G     classes
H     dictionaries of a tree: that of all rows, and one without each fold
P     processes
b     rows of a block
m     some of the rows
c     coordinates of a dictionary: features, or axes of the rows' space
p     axes of the space that the rows span
====  =======================================================================

K' is the number of nodes that are there. Modules that use another letter, or one of these otherwise, say so.
"""

from typing import Any, TypeAlias

import jax
from jaxtyping import Array, Bool, Float, Int, Shaped

__all__ = ["Array", "ArrayLike", "Bool", "Count", "DTypeLike", "Float", "Int", "KeyArray", "Shaped"]

KeyArray: TypeAlias = jax.Array
# a count, as a Python integer or a traced array; an array with one count per problem where problems are stacked
Count: TypeAlias = Any
ArrayLike: TypeAlias = Any
DTypeLike: TypeAlias = Any
