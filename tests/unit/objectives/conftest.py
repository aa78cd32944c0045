"""The models of the tests beside."""

from unit.models.conftest import tiny

__all__ = ["tiny"]
