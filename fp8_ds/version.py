"""The version of this package, which importing the package itself would install."""

from __future__ import annotations

VERSION = "0.1.0"
