"""Real engines, seen from inside and from outside: their internals, their steps, their clients, their predictions."""
