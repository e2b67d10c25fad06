"""Independent seeds for everything random in a run, derived from the run's one seed."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a seed for `purpose`. It is a hash, since torch's CPU generator uses only 32 bits of a seed.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:4], "little")
