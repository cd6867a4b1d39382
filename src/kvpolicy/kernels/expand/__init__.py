"""From events to moves, for all layers, KV heads and requests at once.

``reference`` loops over the core's planner; ``torch`` is vectorised and runs on any device; ``compiled`` runs on the
CPU and needs numba. All have ``expand_moves(events, grid)`` and give the same moves in the same order.
"""
