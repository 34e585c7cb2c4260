"""The version, alone in a module that imports nothing: the build reads it without importing the package."""

__version__ = "0.1.0"
