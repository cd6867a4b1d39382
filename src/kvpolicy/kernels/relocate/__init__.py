"""Application of moves to KV caches, in place, bit for bit.

``reference`` copies one element at a time; ``torch`` is vectorised and runs on any device; ``compiled`` runs on the
CPU and needs numba. All have ``relocate(caches, layout, moves, tables)``.
"""
