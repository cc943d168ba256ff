"""Everything that is patched in other libraries now, to be undone by `fp8_ds.uninstall()`."""

from __future__ import annotations

from typing import Any


class PatchRecord:
    """Patches that are applied now.

    Attributes:
        patches: (object, attribute, original value), newest last.
        finder: the import hook that waits for deepspeed; None if there is none.
    """

    def __init__(self) -> None:
        self.patches: list[tuple[Any, str, Any]] = []
        self.finder: Any = None

    def set(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute of `target`, and keep the original."""
        self.patches.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put every original value back."""
        while self.patches:
            target, name, stock = self.patches.pop()
            setattr(target, name, stock)


RECORD = PatchRecord()
