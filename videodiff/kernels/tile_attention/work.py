"""What a kernel is asked to do: a list of (query tile, key tile) pairs, packed for scalar memory.

Owns: the packing, tile geometry. Does not own: which tiles are visited (`attention.tiles` plans them).
Invariant: the pairs of a query tile are neighbours in the list; every query tile occurs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import numpy as np

FIRST, LAST = 1, 2  # flags of a word
KEY_SHIFT, KEY_BITS = 2, 14
QUERY_SHIFT = KEY_SHIFT + KEY_BITS
MAX_TILES = 1 << KEY_BITS


@dataclass(frozen=True, eq=False)
class Work:
    """Tiles to visit, shared by spatial and temporal heads: either kind counts tiles in its own order.

    Args:
      words: [pairs] int32, ``query tile << 16 | key tile << 2 | last << 1 | first`` of the query tile's pairs.
      frames, patches: F and P.
      query_patches, key_patches: patches of a tile; it has F times as many tokens. A spatial head's tile is that many
        neighbouring tokens, a temporal head's the same patches of all frames.
      own: every query tile visits all key tiles that hold its own tokens.
    """

    words: np.ndarray
    frames: int
    patches: int
    query_patches: int
    key_patches: int
    own: bool

    @property
    def tokens(self) -> int:
        return self.frames * self.patches

    @property
    def query_tiles(self) -> int:
        return -(-self.patches // self.query_patches)

    @property
    def key_tiles(self) -> int:
        return -(-self.patches // self.key_patches)

    def visited(self) -> np.ndarray:
        """[query tiles, key tiles] bool."""
        words = np.asarray(self.words)
        table = np.zeros((self.query_tiles, self.key_tiles), bool)
        table[words >> QUERY_SHIFT, words >> KEY_SHIFT & (MAX_TILES - 1)] = True
        return table


jax.tree_util.register_dataclass(
    Work, data_fields=["words"], meta_fields=[f.name for f in fields(Work) if f.name != "words"]
)


def work_of(visited: np.ndarray, frames: int, patches: int, query_patches: int, key_patches: int) -> Work:
    """Pack a table of visited tiles.

    Args:
      visited: [query tiles, key tiles] bool, at least one in every row.
      frames, patches: F and P.
      query_patches, key_patches: patches of a tile.

    Raises:
      ValueError: a table of another shape, an empty row, or more tiles than a word can hold.
    """
    shape = (-(-patches // query_patches), -(-patches // key_patches))
    if visited.shape != shape:
        raise ValueError(
            f"{frames} x {patches} tokens in tiles of {query_patches} and {key_patches} patches make {shape} tiles, "
            f"got {visited.shape=}"
        )
    if max(shape) > MAX_TILES:
        raise ValueError(f"{shape} tiles are more than the {MAX_TILES} of a packed word; use larger tiles")
    if not visited.any(1).all():
        raise ValueError(f"every query tile must visit a key tile; {int((~visited.any(1)).sum())} visit none")
    rows, keys = np.nonzero(visited)
    turn = np.flatnonzero(np.diff(rows, prepend=-1))
    first, last = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    first[turn] = FIRST
    last[np.append(turn[1:], len(rows)) - 1] = LAST
    tokens = frames * patches
    start = np.arange(shape[0]) * query_patches * frames
    stop = np.minimum(start + query_patches * frames, tokens)
    tile = key_patches * frames
    own = all(visited[i, a // tile : -(-b // tile)].all() for i, (a, b) in enumerate(zip(start, stop, strict=True)))
    words = rows << QUERY_SHIFT | keys << KEY_SHIFT | last | first
    return Work(words.astype(np.int32), frames, patches, query_patches, key_patches, own)
