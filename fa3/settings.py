"""How fa3 runs by the environment: variables whose names begin with FA3_.

They are read when fa3 is imported, and checked when it is first called: an import that fails says
less. `FA3_CACHE_DIR` is a path and read where it is used (`fa3.running.code_cache`).
"""

import os

ACCEPTED = {
    "FA3_ASSERTIONS": ("0", "1"),
    "FA3_FP8_EXP": ("linear", "exact"),
    "FA3_FP8_SUMS": ("two-level", "one-level"),
    "FA3_ROW_MAX": ("auto", "online"),
}
"""Values that variables may have; the first is the default."""

SETTINGS = {name: os.environ.get(name) or values[0] for name, values in ACCEPTED.items()}
"""The variables' values, accepted or not."""


def check_settings() -> None:
    """Raise ValueError unless all variables have values that are accepted."""
    for name, value in SETTINGS.items():
        if value not in ACCEPTED[name]:
            accepted = " or ".join(map(repr, ACCEPTED[name]))
            raise ValueError(f"the environment variable {name} must be {accepted}, got {value!r}")
