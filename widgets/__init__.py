"""One interactive piece per lesson: `from widgets import kv_cache; kv_cache.show()`. None of them imports torch."""
