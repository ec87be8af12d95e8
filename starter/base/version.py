"""The version of the project, which every timeline carries in its header."""

__version__ = "0.5.0"
